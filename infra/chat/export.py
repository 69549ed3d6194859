"""The chat template beside a policy's weights, so that other programs render what gyre trained on.

Invariant: transformers and what builds on it, given this folder, render a conversation to the tokens of the folder's
renderer, where no text spells a special token and an assistant's text starts with no white space (programs that
tokenise a whole conversation merge there).
"""

from __future__ import annotations

import json
from pathlib import Path

from infra.chat.renderer import Renderer
from infra.files import write_whole

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"


def write_template(folder: Path, renderer: Renderer) -> None:
    """Write ``chat_template.jinja``, and the same as ``chat_template`` in an existing ``tokenizer_config.json``, for
    programs that know only that. Each is replaced whole or not at all.
    """
    source = renderer.template
    write_whole(folder / TEMPLATE_FILE, source)
    config = folder / TOKENIZER_CONFIG
    if config.exists():
        described = {**json.loads(config.read_text(encoding="utf-8")), "chat_template": source}
        write_whole(config, json.dumps(described, indent=2, ensure_ascii=False) + "\n")
