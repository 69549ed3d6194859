"""Renderers of both ChatML families, over small tokenizers trained here."""

from __future__ import annotations

import pytest
from chat_parts import write_tokenizer

from infra.chat.qwen3 import Qwen3Renderer
from infra.chat.smollm2 import SmolLM2Renderer


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Qwen3Renderer:
    return Qwen3Renderer(write_tokenizer(tmp_path_factory.mktemp("qwen"), qwen=True))


@pytest.fixture(scope="session")
def smol(tmp_path_factory: pytest.TempPathFactory) -> SmolLM2Renderer:
    return SmolLM2Renderer(write_tokenizer(tmp_path_factory.mktemp("smol"), qwen=False))


@pytest.fixture(scope="session", params=["qwen", "smol"])
def renderer(request: pytest.FixtureRequest) -> Qwen3Renderer | SmolLM2Renderer:
    found: Qwen3Renderer | SmolLM2Renderer = request.getfixturevalue(request.param)
    return found
