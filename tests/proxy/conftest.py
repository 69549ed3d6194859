"""Fixtures of the proxy tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from proxy_parts import ProxyStack, write_tokenizer
from redis.asyncio import Redis

from infra.chat.qwen3 import Qwen3Renderer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Qwen3Renderer:
    return Qwen3Renderer(write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"), compact_tools=True)


@pytest.fixture
async def stack(redis: Redis, renderer: Qwen3Renderer) -> AsyncIterator[ProxyStack]:
    stack = ProxyStack(redis, renderer)
    yield stack
    await stack.stop()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
