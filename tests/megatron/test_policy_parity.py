"""The trainer computes the same log-probabilities as Hugging Face's model, whatever is packed together."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.megatron.checkpoint import read_policy
from infra.megatron.model import model as megatron_model
from infra.megatron.model.model import build, target_logprobs
from infra.megatron.model.pack import Runs
from infra.megatron.model.shape import UnsupportedPolicy, read_shape
from infra.megatron.model.weights import WeightsError, add_into, copy_into, named_tensors, table

LENGTHS = (17, 1, 40, 7)


def megatron_policy(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    shape = read_shape(folder)
    model = build(shape)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        copy_into(table(shape, set(parameters)), read_policy(folder), parameters)
    return model, parameters


def packed_batch() -> tuple[torch.Tensor, Runs, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    n, runs = sum(LENGTHS), Runs.alone(*LENGTHS)
    target = torch.rand(n, generator=random) > 0.3
    target[runs.cu_seqlens[:-1]] = False
    temperature = torch.where(torch.rand(n, generator=random) > 0.5, 0.7, 1.0)
    return torch.randint(0, 160, (n,), generator=random), runs, target, temperature


@pytest.mark.parametrize("policy", ["policy_dir", "untied_policy_dir", "expert_policy_dir"])
def test_packed_sequences_have_the_logprobs_of_separate_hugging_face_runs(
    policy: str, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoModelForCausalLM

    folder = request.getfixturevalue(policy)
    model, _ = megatron_policy(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    ids, runs, target, temperature = packed_batch()
    ends = runs.cu_seqlens.tolist()
    expected = torch.zeros(len(ids))
    for start, end in pairwise(ends):
        logits = reference(ids[None, start:end]).logits[0, :-1] / temperature[start + 1 : end, None]
        expected[start + 1 : end] = torch.log_softmax(logits, -1).gather(1, ids[start + 1 : end, None])[:, 0]

    logprobs = target_logprobs(model, ids, runs, target, temperature)

    assert logprobs.dtype == torch.float32
    assert torch.all(logprobs[~target] == 0)
    assert (logprobs - expected)[target].abs().max() < 1e-5


def test_chunked_and_recomputed_logits_give_the_same_logprobs_and_gradients(
    policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, parameters = megatron_policy(policy_dir)
    batch = packed_batch()

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs = target_logprobs(model, *batch)
        names = list(parameters)
        gradients = torch.autograd.grad(logprobs.exp().sum(), [parameters[name] for name in names])
        return logprobs.detach(), dict(zip(names, gradients, strict=True))

    at_once, gradients = run()
    monkeypatch.setattr(megatron_model, "LOGIT_CHUNK_BYTES", 5 * 4 * 160)
    monkeypatch.setattr(megatron_model, "LOGIT_KEEP_BYTES", 0)
    chunked, chunked_gradients = run()

    assert torch.allclose(at_once, chunked, atol=1e-6)
    for name, gradient in gradients.items():
        assert (gradient - chunked_gradients[name]).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_a_target_that_nothing_precedes_is_refused(policy_dir: Path) -> None:
    model, _ = megatron_policy(policy_dir)
    ids, runs, target, temperature = packed_batch()
    target[LENGTHS[0]] = True
    with pytest.raises(ValueError, match="nothing precedes"):
        target_logprobs(model, ids, runs, target, temperature)


@pytest.mark.parametrize("policy", ["untied_policy_dir", "expert_policy_dir"])
def test_weights_go_through_megatrons_layout_and_back_unchanged(policy: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(policy)
    _, parameters = megatron_policy(folder)
    rows = table(read_shape(folder), set(parameters))
    stored = read_policy(folder)
    back = dict(named_tensors(rows, parameters))
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], stored[name]) for name in stored)
    with torch.no_grad():
        add_into(rows, stored, parameters)
    assert all(torch.equal(tensor, 2 * stored[name]) for name, tensor in named_tensors(rows, parameters))


def test_weights_of_another_policy_are_refused_before_any_is_written(policy_dir: Path) -> None:
    _, parameters = megatron_policy(policy_dir)
    rows = table(read_shape(policy_dir), set(parameters))
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    strange = read_policy(policy_dir)
    strange["model.norm.weight"] = torch.zeros(3)
    with torch.no_grad(), pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        copy_into(rows, strange, parameters)
    del strange["model.norm.weight"]
    with torch.no_grad(), pytest.raises(WeightsError, match="missing"):
        copy_into(rows, strange, parameters)
    assert all(torch.equal(before[name], parameter) for name, parameter in parameters.items())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "yarn"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 2}}, "linear"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "with and without experts"),
    ],
)
def test_what_the_trainer_does_not_build_is_refused_by_name(
    policy_dir: Path, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    config = json.loads((policy_dir / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedPolicy, match=named):
        read_shape(tmp_path)


def test_rope_theta_is_read_where_either_generation_of_transformers_wrote_it(policy_dir: Path, tmp_path: Path) -> None:
    config = json.loads((policy_dir / "config.json").read_text())
    assert read_shape(policy_dir).rope_theta == 20000.0
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    assert read_shape(tmp_path).rope_theta == 5e5
