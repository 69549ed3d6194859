"""Which renderer a policy gets: by ``gyre.json``, the tokenizer's special tokens and the model's type.

A family is chosen only where its spelling is known to be the model's; everything else gets its own chat template, if
that is append-only. Nothing is guessed: without any of them the policy is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infra.chat.chatml import IM_END, IM_START, MARKS
from infra.chat.export import TEMPLATE_FILE, TOKENIZER_CONFIG
from infra.chat.probes import TemplateUnfit
from infra.chat.qwen3 import Qwen3Renderer
from infra.chat.renderer import Renderer
from infra.chat.smollm2 import SmolLM2Renderer
from infra.chat.stock import StockRenderer

QWEN3_TYPES = ("qwen3", "qwen3_moe")
SMOLLM2_TYPES = ("llama",)


class NoRenderer(ValueError):
    """gyre can't render for this policy; the message says why and what to do."""


def renderer_for(policy_folder: Path, *, compact_tools: bool | None = None) -> Renderer:
    """The renderer for the policy in a Hugging Face folder; ``tokenizer.json`` is all that it must hold.

    ``compact_tools`` lists tools by name only; None: as ``gyre.json`` says, else no. ``gyre.json`` may also name the
    family (``"renderer": "qwen3" | "smollm2" | "stock"``) and set variables of a stock template
    (``"template_variables": {...}``). Raises NoRenderer, and TokenizerUnfit for a named family that doesn't fit.
    """
    settings = _json(policy_folder / "gyre.json")
    compact = bool(settings.get("compact_tools", False)) if compact_tools is None else compact_tools
    file = policy_folder / "tokenizer.json"
    family = settings.get("renderer") or _family(policy_folder, file)
    match family:
        case "qwen3":
            return Qwen3Renderer(file, compact_tools=compact)
        case "smollm2":
            return SmolLM2Renderer(file, compact_tools=compact)
        case "stock" if compact:
            raise NoRenderer(f"{policy_folder}: compact_tools isn't possible with a stock chat template")
        case "stock":
            return _stock(policy_folder, file, settings)
    raise NoRenderer(f"{policy_folder}/gyre.json: renderer {family!r} is none of qwen3, smollm2, stock")


def _family(folder: Path, file: Path) -> str:
    added = {token["content"] for token in _json(file).get("added_tokens", ())}
    model = _json(folder / "config.json").get("model_type")
    template = _template(folder) or ""
    if {IM_START, IM_END, *MARKS} <= added and model in (None, *QWEN3_TYPES) and "<function=" not in template:
        return "qwen3"
    chatml = {IM_START, IM_END} <= added and not added.intersection(MARKS)
    # SmolLM2's own template knows no tools; one that does is another model's, or the one that gyre exported.
    if chatml and model in (None, *SMOLLM2_TYPES) and ("tools" not in template or "gyre's ChatML" in template):
        return "smollm2"
    return "stock"


def _stock(folder: Path, file: Path, settings: dict[str, Any]) -> Renderer:
    source = _template(folder)
    model = _json(folder / "config.json").get("model_type")
    if source is None:
        raise NoRenderer(
            f"{folder}: model type {model!r} is of no family that gyre knows (qwen3, smollm2), and there is no chat "
            'template to fall back on; name one in gyre.json ("renderer": "qwen3"), or put chat_template.jinja there'
        )
    chosen = settings.get("template_variables", {})
    source = "".join(f"{{%- set {name} = {json.dumps(value)} %}}" for name, value in chosen.items()) + source
    config = _json(folder / TOKENIZER_CONFIG)
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    spelled = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items() if token}
    try:
        return StockRenderer(file, source, spelled)
    except TemplateUnfit as error:
        raise NoRenderer(
            f"{folder}: its chat template is not append-only: {error}. Give it one that is (chat_template.jinja), or "
            "name the family in gyre.json"
        ) from error


def _template(folder: Path) -> str | None:
    """The folder's chat template: of its own file, else in the tokenizer's configuration; None without one."""
    file = folder / TEMPLATE_FILE
    if file.exists():
        return file.read_text(encoding="utf-8")
    stored = _json(folder / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(stored, list):  # several by name
        stored = {named["name"]: named["template"] for named in stored}.get("default")
    return stored if isinstance(stored, str) else None


def _json(file: Path) -> dict[str, Any]:
    """The object in a file; empty when there is no such file. Raises NoRenderer for a file that holds none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise NoRenderer(f"{file} isn't JSON: {error}") from error
    if not isinstance(value, dict):
        raise NoRenderer(f"{file} holds no object")
    return value
