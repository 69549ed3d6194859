"""Cells that come and go, connections that drop, proxies that die: nothing is lost and nothing is sampled twice."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest
from proxy_parts import QUICK, Harness, ProxyStack, call_text, until

from infra.state import keys
from proxy.calls.recorder import Recorder
from proxy.dialects import openai_chat
from workers.harness_check.verify import sequences

TURN = "one two three four five six seven eight<|im_end|>"


async def harness_of(stack: ProxyStack, session: aiohttp.ClientSession, **key: Any) -> Harness:
    proxy = stack.gateways[-1] if stack.gateways else await stack.proxy()
    harness = Harness(proxy.url, await stack.key(**key), session)
    harness.user("go")
    return harness


@pytest.mark.parametrize("streams", [True, False])
async def test_a_call_moves_to_another_cell_when_its_route_closes(
    stack: ProxyStack, session: aiohttp.ClientSession, streams: bool
) -> None:
    first = await stack.open("cell-0", version=3)
    first.gate.clear()
    first.stop_after = 4
    harness = await harness_of(stack, session, max_new_tokens=400 if streams else 64)
    stack.replies = [TURN]
    answer = asyncio.create_task(harness.turn())
    await until(lambda: first.seen, "asked")
    await stack.close("cell-0", version=3)
    acks = await until(lambda: stack.redis.hgetall(keys.route_acks("cell-0")), "acknowledged")
    assert acks == {b"proxy-0": b"i0:2"}
    await until(lambda: stack.redis.hlen(keys.holding("ep")), "held")
    assert not answer.done()
    second = await stack.open("cell-1", version=4)
    await answer
    (record,) = await stack.records()
    whole = stack.renderer.tokenizer.encode(TURN, add_special_tokens=False).ids
    assert record.output_ids.tolist() == whole
    assert record.versions.tolist() == [3] * 4 + [4] * (len(whole) - 4)
    assert second.seen[0].input_ids == first.seen[0].input_ids + whole[:4]
    assert second.seen[0].max_new_tokens == first.seen[0].max_new_tokens - 4
    assert record.cells == ["cell-0", "cell-1"] and record.resampled == 0
    assert record.held_s > 0
    assert float(await stack.redis.get(keys.held("ep"))) == pytest.approx(record.held_s, abs=1e-3)
    assert await stack.redis.hlen(keys.holding("ep")) == 0


async def test_a_restarted_engine_is_another_cell(stack: ProxyStack, session: aiohttp.ClientSession) -> None:
    engine = await stack.open("cell-0", incarnation="i0")
    engine.gate.clear()
    engine.stop_after = 2
    harness = await harness_of(stack, session)
    stack.replies = [TURN]
    answer = asyncio.create_task(harness.turn())
    await until(lambda: engine.seen, "asked")
    await stack.open("cell-0", incarnation="i1", epoch=2)
    engine.gate.set()
    await answer
    (record,) = await stack.records()
    assert len(engine.seen) == 2
    assert record.output_ids.tolist() == stack.renderer.tokenizer.encode(TURN, add_special_tokens=False).ids


async def test_a_weight_update_splits_the_turn(stack: ProxyStack, session: aiohttp.ClientSession) -> None:
    engine = await stack.open("cell-0", version=1)
    engine.gate.clear()
    engine.stop_after = 3
    harness = await harness_of(stack, session)
    answer = asyncio.create_task(harness.turn())
    await until(lambda: engine.seen, "asked")
    await stack.open("cell-0", version=2, epoch=2)
    engine.gate.set()
    await answer
    (record,) = await stack.records()
    assert record.versions.tolist()[:4] == [1, 1, 1, 2]


async def test_a_dead_engine_loses_nothing_that_it_reported(stack: ProxyStack, session: aiohttp.ClientSession) -> None:
    first = await stack.open("cell-0")
    first.gate.clear()
    first.stop_after = 5
    harness = await harness_of(stack, session, max_new_tokens=400)
    stack.replies = [TURN]
    answer = asyncio.create_task(harness.turn())
    await until(lambda: first.seen, "asked")
    second = await stack.open("cell-1")
    first.die()
    await answer
    (record,) = await stack.records()
    assert second.seen[0].input_ids == first.seen[0].input_ids + record.output_ids.tolist()[:5]
    assert record.resampled == 0


async def test_an_engine_that_ignores_aborts_is_cancelled_and_acknowledged(
    stack: ProxyStack, session: aiohttp.ClientSession
) -> None:
    first = await stack.open("cell-0")
    first.gate.clear()
    first.stop_after, first.deaf = 5, True
    harness = await harness_of(stack, session, max_new_tokens=400)
    answer = asyncio.create_task(harness.turn())
    await until(lambda: first.seen, "asked")
    await stack.close("cell-0")
    await asyncio.sleep(QUICK.revoke_s / 2)
    assert not await stack.redis.hlen(keys.route_acks("cell-0")), "acknowledged with a request still there"
    await until(lambda: stack.redis.hlen(keys.route_acks("cell-0")), "acknowledged")
    await stack.open("cell-1")
    await answer
    (record,) = await stack.records()
    assert record.cells == ["cell-0", "cell-1"]


async def test_without_a_cell_a_call_is_held_until_one_opens(stack: ProxyStack, session: aiohttp.ClientSession) -> None:
    harness = await harness_of(stack, session)
    answer = asyncio.create_task(harness.turn())
    await until(lambda: stack.redis.hlen(keys.holding("ep")), "held")
    since = float((await stack.redis.hvals(keys.holding("ep")))[0])
    assert abs(time.time() - since) < 10
    await stack.open("cell-0")
    await answer
    (record,) = await stack.records()
    assert record.held_s > 0 and record.active_s < record.held_s + 5
    assert float(await stack.redis.get(keys.held("ep"))) == pytest.approx(record.held_s, abs=1e-3)


async def test_a_held_stream_is_pinged(stack: ProxyStack, session: aiohttp.ClientSession) -> None:
    harness = await harness_of(stack, session)
    answer = asyncio.create_task(harness.post(stream=True))
    await until(lambda: stack.redis.hlen(keys.holding("ep")), "held")
    await asyncio.sleep(3 * QUICK.ping_s)
    await stack.open("cell-0")
    status, text = await answer
    assert status == 200 and text.count(": keep-alive") >= 2 and text.endswith("data: [DONE]\n\n")


async def test_a_call_waits_for_a_version_in_its_window(stack: ProxyStack, session: aiohttp.ClientSession) -> None:
    old = await stack.open("cell-0", version=1)
    harness = await harness_of(stack, session, min_version=2, max_version=3)
    answer = asyncio.create_task(harness.turn())
    await until(lambda: stack.redis.hlen(keys.holding("ep")), "held")
    new = await stack.open("cell-1", version=4)
    await asyncio.sleep(3 * QUICK.refresh_s)
    assert not answer.done() and not old.seen and not new.seen
    await stack.open("cell-1", version=3, epoch=2)
    await answer
    assert not old.seen and len(new.seen) == 1


async def test_an_answer_too_late_is_a_503_and_the_call_is_found_again(
    stack: ProxyStack, session: aiohttp.ClientSession
) -> None:
    await stack.proxy(QUICK.model_copy(update={"answer_s": 0.3}))
    harness = await harness_of(stack, session)
    status, body = await harness.post()
    assert status == 503 and body["error"]["code"] == "no_cell"
    again = asyncio.create_task(harness.post())  # the same, kept-alive connection
    await asyncio.sleep(0.1)
    engine = await stack.open("cell-0")
    assert (await again)[0] == 200
    assert len(engine.seen) == 1 and len(await stack.records()) == 1


async def test_conversations_stay_on_their_cell_and_spread_over_cells(
    stack: ProxyStack, session: aiohttp.ClientSession
) -> None:
    for cell in ("cell-0", "cell-1"):
        await stack.open(cell)
    for number in range(12):
        harness = await harness_of(stack, session, episode=f"ep{number}")
        stack.replies = [call_text("ls"), call_text("ls"), "end<|im_end|>"]
        for _ in range(3):
            message = await harness.turn()
            if message.get("tool_calls"):
                harness.answer(message, "fox")
        assert len({record.cells[0] for record in await stack.records(f"ep{number}")}) == 1
    assert all(engine.seen for engine in stack.engines.values())


async def drop_while_running(stack: ProxyStack, harness: Harness) -> None:
    """Ask, and close the connection while the engine is at work."""
    engine = stack.engines["cell-0"]
    engine.gate.clear()
    async with aiohttp.ClientSession() as session:
        lost = asyncio.create_task(Harness.post(_with_session(harness, session)))
        await until(lambda: engine.seen, "asked")
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)


def _with_session(harness: Harness, session: aiohttp.ClientSession) -> Harness:
    other = Harness(harness.url, harness.key, session)
    other.messages, other.tools = harness.messages, harness.tools
    return other


@pytest.mark.parametrize("finished", [True, False])
async def test_a_dropped_connection_and_the_same_request_again_is_one_call(
    stack: ProxyStack, session: aiohttp.ClientSession, finished: bool
) -> None:
    engine = await stack.open("cell-0")
    harness = await harness_of(stack, session)
    await drop_while_running(stack, harness)
    if finished:
        engine.gate.set()
        await until(lambda: stack.redis.llen(keys.calls("ep")), "recorded")
        await harness.turn()
    else:
        answer = asyncio.create_task(harness.turn())
        await until(lambda: stack.gateways[0].gateway.counts[""]["joined"], "joined")
        engine.gate.set()
        await answer
    harness.user("next")
    await harness.turn()
    records = await stack.records()
    assert len(engine.seen) == 2 and [record.parent for record in records] == [-1, 0]


async def test_a_plain_request_after_a_dropped_stream_gets_the_same_turn(
    stack: ProxyStack, session: aiohttp.ClientSession
) -> None:
    engine = await stack.open("cell-0")
    harness = await harness_of(stack, session)
    stack.replies = [call_text("ls")]
    async with aiohttp.ClientSession() as dropped:
        status, text = await _with_session(harness, dropped).post(stream=True)
    assert status == 200
    await until(lambda: all(c.closed for c in _connections(stack)), "closed")
    message = await harness.turn()
    assert message["tool_calls"][0]["id"] in text and len(engine.seen) == 1


def _connections(stack: ProxyStack) -> set[Any]:
    episode = stack.gateways[0].gateway._episodes._known["ep"]
    return {c for attempts in episode.attempts.values() for attempt in attempts for c in attempt.connections}


async def test_parallel_identical_requests_are_two_samples(stack: ProxyStack, session: aiohttp.ClientSession) -> None:
    engine = await stack.open("cell-0")
    engine.gate.clear()
    harness = await harness_of(stack, session)
    stack.replies = [call_text("a"), call_text("b")]
    answers = [asyncio.create_task(harness.post()) for _ in range(2)]
    await until(lambda: len(engine.seen) == 2, "both asked")
    engine.gate.set()
    bodies = [body for _, body in await asyncio.gather(*answers)]
    ids = {body["choices"][0]["message"]["tool_calls"][0]["id"] for body in bodies}
    assert len(ids) == 2
    records = await stack.records()
    full = sequences(records)
    assert len(full) == 2 and full[0] != full[1]
    assert records[1].parent == 0 and len(records[1].prompt_ids) == 0


async def test_a_delivered_turn_asked_for_again_on_the_open_connection_is_sampled_again(
    stack: ProxyStack, session: aiohttp.ClientSession
) -> None:
    engine = await stack.open("cell-0")
    harness = await harness_of(stack, session)
    await harness.post()
    await harness.post()
    assert len(engine.seen) == 2


async def test_a_call_that_nobody_comes_back_for_is_aborted(stack: ProxyStack, session: aiohttp.ClientSession) -> None:
    engine = await stack.open("cell-0")
    await stack.proxy(QUICK.model_copy(update={"abandon_s": 0.2}))
    harness = await harness_of(stack, session)
    await drop_while_running(stack, harness)
    await until(lambda: stack.gateways[0].gateway.status()["running"] == 0, "abandoned")
    assert await stack.redis.hlen(keys.open_calls("ep")) == 0
    engine.gate.set()
    await harness.turn()
    assert len(await stack.records()) == 1


async def test_the_conversation_goes_on_after_a_proxy_restart(
    stack: ProxyStack, session: aiohttp.ClientSession
) -> None:
    engine = await stack.open("cell-0")
    harness = await harness_of(stack, session)
    harness.messages.insert(0, {"role": "assistant", "content": "a synthetic start"})
    for _ in range(2):
        stack.replies = ["hm" + call_text("ls")]
        message = await harness.turn()
        harness.answer(message, "fox")
        message["content"] = "rewritten"
    await stack.gateways.pop().stop()
    harness.url = (await stack.proxy()).url
    await harness.turn()
    harness.user("and on")
    await harness.turn()
    records = await stack.records()
    full = sequences(records)
    assert [record.parent for record in records] == [-1, 0, 1, 2]
    assert [record.synthetic for record in records] == [1, 1, 1, 1]
    assert [record.mutated for record in records] == [False, True, True, True]
    for number, record in enumerate(records):
        assert full[number] == engine.seen[number].input_ids + engine.seen[number].output_ids
        assert number == 0 or record.kept == len(full[number - 1])


async def test_a_recorded_turn_is_replayed_by_the_next_proxy(stack: ProxyStack, session: aiohttp.ClientSession) -> None:
    engine = await stack.open("cell-0")
    harness = await harness_of(stack, session)
    stack.replies = [call_text("ls")]
    _, body = await harness.post()
    await stack.gateways.pop().stop()
    harness.url = (await stack.proxy()).url
    _, again = await harness.post()
    assert again == body and len(engine.seen) == 1 and len(await stack.records()) == 1


async def test_a_call_that_died_with_its_proxy_is_sampled_again_and_counted(
    stack: ProxyStack, session: aiohttp.ClientSession
) -> None:
    engine = await stack.open("cell-0")
    harness = await harness_of(stack, session)
    await harness.post()
    harness.user("more")
    request = openai_chat.parse(
        json.dumps({"model": "m", "messages": harness.messages, "tools": harness.tools}).encode(), {}
    )
    recorder = Recorder(stack.redis, "dead-proxy", patience_s=1)
    await recorder.open("ep", "dead", cell="cell-0", engine_rid="dead.0", digest=request.digest)
    await stack.redis.hset(keys.holding("ep"), "dead", "1.0")
    await stack.gateways.pop().stop()
    harness.url = (await stack.proxy()).url
    await harness.post()
    records = await stack.records()
    assert [record.resampled for record in records] == [0, 1]
    assert await stack.redis.hlen(keys.open_calls("ep")) == 0 == await stack.redis.hlen(keys.holding("ep"))
    assert len(engine.seen) == 2


async def test_two_proxies_serve_one_episode(stack: ProxyStack, session: aiohttp.ClientSession) -> None:
    engine = await stack.open("cell-0")
    harness = await harness_of(stack, session)
    urls = [stack.gateways[0].url, (await stack.proxy()).url]
    for number in range(6):
        harness.url = urls[number % 2]
        stack.replies = [call_text(f"ls {number}")]
        harness.answer(await harness.turn(), "fox")
    others = [Harness(urls[number % 2], harness.key, session) for number in range(8)]
    for number, other in enumerate(others):
        other.messages = [*harness.messages, {"role": "user", "content": f"branch {number}"}]
    await asyncio.gather(*(other.turn() for other in others))
    records = await stack.records()
    full = sequences(records)
    assert [record.parent for record in records[:6]] == [-1, 0, 1, 2, 3, 4]
    assert len(records) == 14
    assert sorted(map(tuple, full)) == sorted(tuple(s.input_ids + s.output_ids) for s in engine.seen)
    # every branch keeps the conversation that it continues, none repeats it
    assert all(record.kept >= len(full[5]) for record in records[6:])


async def test_a_stopping_proxy_leaves_its_lease_and_nobody_waits_for_it(stack: ProxyStack) -> None:
    proxy = await stack.proxy()
    assert await stack.redis.exists(keys.proxy_lease("proxy-0"))
    assert await stack.redis.sismember(keys.PROXIES, "proxy-0")
    await asyncio.sleep(1.5 * QUICK.lease_s)
    assert await stack.redis.exists(keys.proxy_lease("proxy-0")), "renewed"
    await proxy.stop()
    stack.gateways.clear()
    assert not await stack.redis.exists(keys.proxy_lease("proxy-0"))


async def test_a_proxy_that_cannot_read_routes_sends_nothing(stack: ProxyStack, session: aiohttp.ClientSession) -> None:
    await stack.open("cell-0")
    await stack.proxy()
    router = stack.gateways[0].gateway.router
    router.table.fresh_until = 0.0
    for task in list(router.tasks):
        task.cancel()
    await asyncio.gather(*router.tasks, return_exceptions=True)
    harness = await harness_of(stack, session)
    answer = asyncio.create_task(harness.post())
    await until(lambda: stack.redis.hlen(keys.holding("ep")), "held")
    assert not stack.engines["cell-0"].seen
    await router.start()
    assert (await answer)[0] == 200
