"""Redis goes away and comes back under a running proxy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from proxy_parts import QUICK, Harness, ProxyStack, until
from redis.asyncio import Redis

from infra.chat.qwen3 import Qwen3Renderer
from workers.stack.valkey import Valkey


@pytest.mark.stack
async def test_a_call_outlives_a_restart_of_redis(
    renderer: Qwen3Renderer, tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    with Valkey(tmp_path) as valkey:
        client = Redis.from_url(valkey.url)
        stack = ProxyStack(client, renderer)
        engine = await stack.open("cell-0")
        proxy = await stack.proxy(QUICK)
        harness = Harness(proxy.url, await stack.key(), session)
        harness.user("go")
        engine.gate.clear()
        answer = asyncio.create_task(harness.turn())
        await until(lambda: engine.seen, "asked")
        valkey.kill()
        engine.gate.set()
        status, body = await harness.post(temperature=0)
        assert status == 503 and body["error"]["code"] == "unavailable"
        assert not answer.done()
        valkey.start()
        await answer
        harness.user("more")
        await harness.turn()
        assert [record.parent for record in await stack.records()] == [-1, 0]
        await stack.stop()
        await client.aclose()
