"""The policy's folder decides on its renderer; what isn't known is refused, not guessed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_parts import write_tokenizer

from infra.chat.chatml import TEMPLATE
from infra.chat.export import write_template
from infra.chat.families import NoRenderer, renderer_for
from infra.chat.tokens import TokenizerUnfit


def folder(tmp_path: Path, *, qwen: bool, **files: object) -> Path:
    write_tokenizer(tmp_path, qwen=qwen)
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


@pytest.mark.parametrize("model", [None, "qwen3", "qwen3_moe"])
def test_qwen3_is_known_by_its_marks(tmp_path: Path, model: str | None) -> None:
    files = {} if model is None else {"config": {"model_type": model}}
    assert renderer_for(folder(tmp_path, qwen=True, **files)).family == "qwen3"


@pytest.mark.parametrize("model", [None, "llama"])
def test_smollm2_is_known_by_lacking_them(tmp_path: Path, model: str | None) -> None:
    files = {} if model is None else {"config": {"model_type": model}}
    path = folder(tmp_path, qwen=False, **files)
    renderer = renderer_for(path)
    assert renderer.family == "smollm2"
    write_template(path, renderer)
    assert renderer_for(path).family == "smollm2"


def test_gyre_json_has_the_first_word(tmp_path: Path) -> None:
    path = folder(tmp_path, qwen=True, gyre={"compact_tools": True, "renderer": "smollm2"})
    renderer = renderer_for(path)
    assert renderer.family == "smollm2" and "compact_tools = true" in renderer.template
    assert "compact_tools = false" in renderer_for(path, compact_tools=False).template


def test_another_model_gets_its_own_template_if_it_is_append_only(tmp_path: Path) -> None:
    path = folder(tmp_path, qwen=True, config={"model_type": "other"}, tokenizer_config={"bos_token": None})
    with pytest.raises(NoRenderer, match="no chat template to fall back on"):
        renderer_for(path)
    (path / "chat_template.jinja").write_text(TEMPLATE.read_text())
    assert renderer_for(path).family == "stock"
    with pytest.raises(NoRenderer, match="compact_tools"):
        renderer_for(path, compact_tools=True)
    (path / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(NoRenderer, match=r"not append-only: probe .* line 1: .*messages\[-1\]"):
        renderer_for(path)


def test_qwen_marks_with_another_spelling_of_calls_are_not_qwen3(tmp_path: Path) -> None:
    path = folder(tmp_path, qwen=True, tokenizer_config={"chat_template": "<tool_call>\n<function=f>"})
    with pytest.raises(NoRenderer, match="not append-only"):
        renderer_for(path)


def test_variables_of_a_template_are_set_in_what_is_used_and_exported(tmp_path: Path) -> None:
    source = TEMPLATE.read_text().replace("message.reasoning_content %}", "message.reasoning_content and keep %}")
    path = folder(tmp_path, qwen=True, config={"model_type": "other"}, tokenizer_config={"chat_template": source})
    with pytest.raises(NoRenderer, match="and keep"):
        renderer_for(path)
    (path / "gyre.json").write_text(json.dumps({"template_variables": {"keep": True}}))
    assert renderer_for(path).template == "{%- set keep = true %}" + source


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"gyre": {"renderer": "other"}}, NoRenderer),
        ({"gyre": []}, NoRenderer),
        ({"gyre": {"renderer": "qwen3"}}, TokenizerUnfit),
    ],
)
def test_a_wrong_choice_is_an_error(tmp_path: Path, files: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        renderer_for(folder(tmp_path, qwen=False, **files))
