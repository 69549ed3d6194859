"""The policy's folder: loads as a plain Qwen3, is reproducible, and is never used half-written."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.chat.families import renderer_for
from infra.chat.qwen3 import Qwen3Renderer
from infra.quickstart.demonstrations import TOOLS, demonstrate
from infra.quickstart.model import make_model
from infra.quickstart.prepare import MANIFEST, is_complete, prepare_policy
from infra.quickstart.recipe import PolicyRecipe, QuickstartShape, WarmStartRecipe
from infra.quickstart.tasks import FAMILIES, make_task
from infra.quickstart.warm_start import encode

SHORT = PolicyRecipe(warm_start=WarmStartRecipe(steps=4, tokens_per_step=512))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_policy(tmp_path_factory.mktemp("policies"), seed=3, recipe=SHORT)


@pytest.fixture
def policy(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil, in a cache folder of its own."""
    return Path(shutil.copytree(made, tmp_path / "cache" / made.name))


def test_the_folder_loads_in_transformers_with_the_tokenizer_that_the_renderer_uses(made: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made)
    tokenizer = AutoTokenizer.from_pretrained(made)
    renderer = Qwen3Renderer(made / "tokenizer.json", compact_tools=True)
    text = "Follow `fox.txt` and write the last word to `answer.txt`."
    assert model.dtype == torch.float32
    assert model.config.vocab_size == renderer.vocab_size == len(tokenizer)
    assert tokenizer.encode(text, add_special_tokens=False) == renderer.text(text)
    assert tokenizer.eos_token_id == renderer.im_end == model.generation_config.eos_token_id
    assert model.config.max_position_embeddings == 8192
    logits = model(torch.tensor([renderer.text(text)])).logits
    assert torch.isfinite(logits).all()


def test_the_exported_template_renders_the_tokens_that_the_policy_was_taught(made: Path) -> None:
    renderer, tokenizer = renderer_for(made), AutoTokenizer.from_pretrained(made)
    tools = [{"type": "function", "function": {"name": tool.name}} for tool in TOOLS]
    assert isinstance(renderer, Qwen3Renderer)
    for family in FAMILIES:
        messages = demonstrate(
            random.Random(family), make_task(random.Random(family), family), mistake_rate=0.3
        ).messages
        sent = [
            {
                "role": message.role,
                "content": message.content,
                "tool_calls": [{"function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls],
            }
            for message in messages
        ]
        ids = tokenizer.apply_chat_template(sent, tools=tools, return_dict=False)
        assert ids == [*encode(renderer, messages).ids, *renderer.text("\n")]


def test_the_same_seed_and_recipe_make_the_same_weights(made: Path, tmp_path: Path) -> None:
    again = prepare_policy(tmp_path, seed=3, recipe=SHORT)
    other = prepare_policy(tmp_path, seed=4, recipe=SHORT)
    assert (again / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()
    assert (other / "model.safetensors").read_bytes() != (made / "model.safetensors").read_bytes()


def test_a_finished_policy_is_reused_untouched(policy: Path) -> None:
    before = (policy / "model.safetensors").stat().st_mtime_ns
    said: list[str] = []
    assert prepare_policy(policy.parent, seed=3, recipe=SHORT, progress=said.append) == policy
    assert (policy / "model.safetensors").stat().st_mtime_ns == before
    assert said == [f"reusing {policy}"]


@pytest.mark.parametrize("spoil", ["no manifest", "cut weights", "manifest cut", "other recipe", "no file", "extra"])
def test_a_folder_that_its_manifest_does_not_vouch_for_is_made_again(policy: Path, made: Path, spoil: str) -> None:
    match spoil:
        case "no manifest":
            (policy / MANIFEST).unlink()
        case "cut weights":
            os.truncate(policy / "model.safetensors", 1000)
        case "manifest cut":
            (policy / MANIFEST).write_text((policy / MANIFEST).read_text()[:100])
        case "other recipe":
            manifest = json.loads((policy / MANIFEST).read_text())
            (policy / MANIFEST).write_text(json.dumps({**manifest, "recipe_digest": "0" * 64}))
        case "no file":
            (policy / "config.json").unlink()
        case "extra":
            (policy / "chat_template.jinja").write_text("{{ messages }}")
    assert not is_complete(policy, SHORT.digest())
    assert prepare_policy(policy.parent, seed=3, recipe=SHORT) == policy
    assert is_complete(policy, SHORT.digest())
    assert (policy / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()
    assert [path.name for path in policy.parent.iterdir()] == [policy.name]


def test_what_a_killed_maker_left_behind_is_not_taken_for_a_policy(tmp_path: Path, made: Path) -> None:
    shutil.copytree(made, tmp_path / ".making-killed" / "policy")
    (tmp_path / ".making-killed" / "policy" / MANIFEST).unlink()
    final = prepare_policy(tmp_path, seed=3, recipe=SHORT)
    assert final.parent == tmp_path
    assert is_complete(final, SHORT.digest())


def test_any_parameter_of_the_recipe_changes_its_digest() -> None:
    longer = PolicyRecipe(warm_start=WarmStartRecipe(steps=5, tokens_per_step=512))
    wider = PolicyRecipe(shape=QuickstartShape(intermediate=384), warm_start=SHORT.warm_start)
    assert len({SHORT.digest(), longer.digest(), wider.digest(), PolicyRecipe().digest()}) == 4


def test_the_initialisation_copies_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    model = make_model(QuickstartShape(), vocabulary=100, end_of_turn=2, padding=0, seed=0)
    assert torch.equal(torch.rand(1), expected)
    attention = model.model.layers[0].self_attn
    torch.testing.assert_close(attention.o_proj.weight @ attention.v_proj.weight, torch.eye(128), atol=1e-5, rtol=0)
