"""Several proxies share one episode: a request that is sent again gets its turn wherever it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from proxy_parts import Harness, ProxyStack, call_text, until

from infra.state import keys
from workers.harness_check.engine import ScriptedEngine


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def nothing(*_: object) -> None:
    return


async def ask_and_leave(stack: ProxyStack, engine: ScriptedEngine, url: str, key: str) -> None:
    """Ask for a turn that the engine holds back, and close the connection."""
    engine.gate.clear()
    async with aiohttp.ClientSession() as session:
        left = Harness(url, key, session)
        left.user("go")
        asking = asyncio.create_task(left.post(stream=True))
        await until(lambda: engine.seen, "the engine has the call")
        asking.cancel()
    await until(lambda: stack.redis.hlen(keys.left_calls("ep")), "the proxy noticed")


async def test_a_request_sent_again_to_another_proxy_waits_for_the_first_ones_turn(
    stack: ProxyStack, session: aiohttp.ClientSession
) -> None:
    engine = await stack.open("a")
    first, second = await stack.proxy(), await stack.proxy()
    key = await stack.key()
    await ask_and_leave(stack, engine, first.url, key)
    again = Harness(second.url, key, session)
    again.user("go")
    waiting = asyncio.create_task(again.post())
    await until(lambda: stack.redis.hlen(keys.wanted_calls("ep")), "the second proxy waits")
    engine.gate.set()
    status, body = await waiting
    assert status == 200, body
    records = await stack.records()
    assert len(records) == 1 and len(engine.seen) == 1
    assert await stack.redis.hlen(keys.left_calls("ep")) == 0
    assert int(await stack.redis.hget(keys.counts("ep"), "replayed")) == 1
    again.messages.append(body["choices"][0]["message"])
    again.user("more")
    await again.turn()
    assert (await stack.records())[1].fork == ""


async def test_the_turn_is_sampled_here_when_the_other_proxy_dies(
    stack: ProxyStack, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await stack.open("a")
    first, second = await stack.proxy(), await stack.proxy()
    key = await stack.key()
    await ask_and_leave(stack, engine, first.url, key)
    monkeypatch.setattr(first.gateway._recorder, "drop", nothing)  # as kill -9 would: nothing is said any more
    for task in [*first.gateway.router.tasks, *first.gateway._running, *first.gateway._background]:
        task.cancel()
    await until(lambda: not first.gateway._running, "the call is gone")
    assert await stack.redis.hlen(keys.left_calls("ep")) == 1
    engine.gate.set()
    again = Harness(second.url, key, session)
    again.user("go")
    status, body = await again.post()
    assert status == 200, body
    assert len(await stack.records()) == 1
    assert await stack.redis.hlen(keys.left_calls("ep")) == 0


async def test_turns_of_one_episode_may_alternate_between_proxies(
    stack: ProxyStack, session: aiohttp.ClientSession
) -> None:
    await stack.open("a")
    proxies = [await stack.proxy(), await stack.proxy()]
    key = await stack.key()
    harness = Harness("", key, session)
    harness.user("go")
    stack.replies += [call_text(f"step {number}") for number in range(6)]
    for number in range(6):
        harness.url = proxies[number % 2].url
        harness.answer(await harness.turn(), f"result {number}")
    records = await stack.records()
    assert [record.fork for record in records] == [""] * 6
    assert [record.parent for record in records] == [-1, 0, 1, 2, 3, 4]
