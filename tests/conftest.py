"""Fixtures that several areas share: a real Valkey, a real harness."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from infra.harness.harness import Harness, HarnessUnavailable
from infra.harness.install import install
from infra.harness.registry import harness_named
from tests.processes import free_port
from workers.stack.valkey import Valkey

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Valkey server of this test session's own."""
    with Valkey(tmp_path_factory.mktemp("valkey"), free_port()) as server:
        yield server.url


@pytest.fixture(scope="session")
def mini_swe_agent() -> Harness:
    """The real harness from PyPI, in the virtual environment of its own that `make test` installs."""
    harness = harness_named("mini-swe-agent", ROOT / ".gyre-harness")
    try:
        harness.check()
    except HarnessUnavailable:
        install("mini-swe-agent", ROOT / ".gyre-harness" / "mini-swe-agent")
        harness.check()
    return harness


@pytest.fixture
async def redis(valkey_url: str) -> AsyncIterator[Redis]:
    """A client of an empty database."""
    client = Redis.from_url(valkey_url)
    await client.flushall()
    yield client
    await client.aclose()
