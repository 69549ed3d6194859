"""What is sent to an engine and what is made of its answers, without an engine."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from infra.sglang.errors import EngineError, EngineRefused, EngineVersionMismatch
from infra.sglang.generation import Assembly, GenerateRequest, encode_body, generate_body, wire_id
from infra.sglang.launch import engine_command, engine_environment
from infra.sglang.weights import check_weights, checkpoint_shapes, pack_weights


def body(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "input_ids": [1, 2, 3],
        "rid": "r",
        "max_new_tokens": 4,
        "temperature": 1.0,
        "stop_token_ids": [7],
        "version": 5,
        "deadline_s": 1.0,
    }
    return generate_body(GenerateRequest(**(plain | changes)), vocab_size=10)


def message(ids: list[int], total: int, finish: dict[str, Any] | None = None, version: str = "5") -> dict[str, Any]:
    meta: dict[str, Any] = {
        "completion_tokens": total,
        "output_token_logprobs": [[-0.5 * i, i, None] for i in ids],
        "finish_reason": finish,
        "weight_version": version,
        "cached_tokens": 3,
    }
    if finish is not None:
        meta["weight_versions"] = [{"version": version, "start": 0, "end": total}]
    return {"output_ids": ids, "meta_info": meta}


@pytest.mark.parametrize(
    "changes",
    [
        {"input_ids": []},
        {"input_ids": [1, 10]},
        {"input_ids": [-1, 1]},
        {"input_ids": [1, 2**32 + 1]},
        {"input_ids": [1, 2**70]},
        {"input_ids": [1.0]},
        {"input_ids": array("i", [3, 10])},
        {"input_ids": np.array([[1, 2]])},
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"rid": ""},
        {"rid": "a$b"},
    ],
)
def test_a_request_that_would_kill_or_confuse_the_engine_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        body(**changes)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=50))
def test_a_prompt_is_the_same_on_the_wire_however_it_was_held(ids: list[int]) -> None:
    held = (ids, tuple(ids), array("i", ids), np.array(ids, dtype=np.int32), np.array(ids + ids)[: len(ids)])
    sent = {encode_body(body(input_ids=form)) for form in held}
    assert len(sent) == 1 and json.loads(sent.pop())["input_ids"] == ids


def test_the_kv_cache_is_separated_by_weight_version() -> None:
    assert body(version=5)["cache_salt"] == "5"


@given(st.text(alphabet="ab/-1", min_size=1), st.text(alphabet="ab/-1", min_size=1))
def test_no_request_id_is_a_prefix_of_another(a: str, b: str) -> None:
    assert wire_id(b).startswith(wire_id(a)) == (a == b)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(0, 4))
def test_streamed_messages_assemble_to_the_whole_even_when_the_last_repeats(
    chunks: list[list[int]], again: int
) -> None:
    got, sent, seen = Assembly(5), [], []
    for chunk in chunks:
        sent += chunk
        seen += got.add(message(chunk, len(sent)))[0]
    tail = sent[len(sent) - again :] if again else []
    got.add(message(tail, len(sent), {"type": "abort", "message": "Abort in waiting queue"}))
    result = got.result()
    assert result.output_ids == seen == sent
    assert result.logprobs == [-0.5 * i for i in sent]
    assert result.versions == [5] * len(sent)
    assert result.finish == "abort"


def test_tokens_of_another_weight_version_are_never_returned() -> None:
    got = Assembly(5)
    last = message([1, 2], 2, {"type": "length", "length": 2}, version="6")
    last["meta_info"]["weight_versions"].insert(0, {"version": "5", "start": 0, "end": 1})
    got.add(last)
    with pytest.raises(EngineVersionMismatch):
        got.result()


def test_a_request_aborted_before_it_sampled_is_empty_whatever_the_engine_serves_now() -> None:
    got = Assembly(5)
    got.add(message([], 0, {"type": "abort", "message": "Abort in waiting queue"}, version="6"))
    assert got.result().output_ids == []


def test_an_abort_that_the_engine_chose_is_a_refusal() -> None:
    got = Assembly(5)
    got.add(message([], 0, {"type": "abort", "message": "too long", "status_code": 400}))
    with pytest.raises(EngineRefused, match="too long"):
        got.result()


def test_columns_that_disagree_are_an_error() -> None:
    broken = message([1, 2], 2)
    broken["meta_info"]["output_token_logprobs"].pop()
    with pytest.raises(EngineError):
        Assembly(5).add(broken)


def test_weights_must_be_the_models_names_shapes_and_dtype(tmp_path: Path) -> None:
    good = {"model.embed_tokens.weight": torch.rand(4, 2), "model.norm.weight": torch.rand(2)}
    save_file(good, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shapes = checkpoint_shapes(tmp_path)
    assert shapes == {"model.embed_tokens.weight": (4, 2), "model.norm.weight": (2,)}
    assert check_weights(good, shapes).keys() == shapes.keys()

    tied = good | {"lm_head.weight": good["model.embed_tokens.weight"].clone()}
    assert check_weights(tied, shapes).keys() == shapes.keys()

    for bad, complaint in [
        (good | {"lm_head.weight": torch.rand(4, 2)}, "ties"),
        ({"model.norm.weight": torch.rand(2)}, "missing"),
        (good | {"model.other": torch.rand(1)}, "not the model's"),
        (good | {"model.norm.weight": torch.rand(3)}, "shape"),
        (good | {"model.norm.weight": torch.rand(2, dtype=torch.float64)}, "float64"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            check_weights(bad, shapes)
    with pytest.raises(FileNotFoundError):
        checkpoint_shapes(tmp_path / "empty")


def test_a_view_is_packed_without_the_storage_behind_it() -> None:
    flat = torch.zeros(1_000_000)
    assert len(pack_weights({"w": flat[:4].view(2, 2)})) < 10_000


def test_each_start_meets_in_a_file_of_its_own(tmp_path: Path) -> None:
    name = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
    first, second = (engine_environment(tmp_path)[name] for _ in range(2))
    assert first != second
    assert first.startswith(f"file://{tmp_path}")
    assert "--sleep-on-idle" in engine_command("m", "127.0.0.1", 1, max_total_tokens=2, context_length=3)


@pytest.mark.parametrize(
    ("details", "host", "storage"),
    [
        (None, 0, 0),
        ({"device": 1, "host": 2}, 2, 0),
        ({"device": 0, "host": 0, "storage": 3, "storage_backend": "K"}, 0, 3),
    ],
)
def test_cached_tokens_are_told_apart_by_where_they_lay(details: Any, host: int, storage: int) -> None:
    got = Assembly(5)
    said = message([1], 1, {"type": "stop"})
    said["meta_info"]["cached_tokens_details"] = details
    got.add(said)
    result = got.result()
    assert (result.cached_tokens, result.cached_host, result.cached_storage) == (3, host, storage)


def test_kv_is_separated_by_weights_where_they_are_known() -> None:
    assert body()["cache_salt"] == "5"
    assert len({body()["cache_salt"], body(weights="aa")["cache_salt"], body(weights="bb")["cache_salt"]}) == 3
    assert body(weights="aa")["cache_salt"] != body(weights="aa", version=6)["cache_salt"]
