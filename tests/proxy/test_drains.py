"""A cell that drains: calls end by themselves as long as they may, the rest moves with its tokens. Real proxy, real
drain activity; only the engines' answers are scripted."""

from __future__ import annotations

import asyncio
from typing import cast

import aiohttp
import pytest
from proxy_parts import QUICK, Harness, ProxyStack, call_text, until
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.cells import DrainActivities
from activities.services import Services
from infra.settings import Settings
from infra.state import keys
from workers.harness_check.engine import ScriptedEngine
from workflows.contracts.orders import DrainInput, DrainResult

LONG_S = 30.0
"""Longer than any wait of these tests."""
TURN = "one two three four five six seven eight<|im_end|>"


async def running_call(
    stack: ProxyStack, session: aiohttp.ClientSession, *, version: int = 0
) -> tuple[ScriptedEngine, Harness, asyncio.Task[dict[str, object]]]:
    """A call of which the engine of cell-0 has sampled three tokens; ``gate`` lets it go on."""
    engine = await stack.open("cell-0", version=version)
    engine.gate.clear()
    engine.stop_after = 3
    proxy = stack.gateways[-1] if stack.gateways else await stack.proxy()
    harness = Harness(proxy.url, await stack.key(), session)
    harness.user("go")
    stack.replies = stack.replies or [TURN]
    answer = asyncio.create_task(harness.turn())
    await until(lambda: engine.seen, "asked")
    return engine, harness, answer


async def drain(stack: ProxyStack, drain_s: float, epoch: int = 2) -> asyncio.Task[DrainResult]:
    """Start the drain of cell-0; returns when every proxy has seen its route closed."""
    activities = DrainActivities(Services(Settings(), cast(Client, None), stack.redis))
    order = DrainInput(cell="cell-0", epoch=epoch, drain_s=drain_s, deadline_s=10)
    task = asyncio.create_task(ActivityEnvironment().run(activities.drain_cell, order))
    for proxy in stack.gateways:
        routes = proxy.gateway.router
        await until(lambda r=routes: (r.routes["cell-0"].open, r.routes["cell-0"].epoch) == (False, epoch), "closed")
    return task


async def test_a_call_ends_on_the_draining_cell_and_the_next_one_goes_elsewhere(
    stack: ProxyStack, session: aiohttp.ClientSession
) -> None:
    stack.replies = [call_text("ls"), "other<|im_end|>", TURN]
    first, harness, answer = await running_call(stack, session)
    second = await stack.open("cell-1")
    draining = await drain(stack, LONG_S)
    other = Harness(harness.url, await stack.key("other"), session)
    other.user("go")
    await other.turn()
    assert len(first.seen) == 1 and len(second.seen) == 1, "a draining cell takes no new call"
    assert not draining.done() and not await stack.redis.hlen(keys.route_acks("cell-0"))
    first.gate.set()
    harness.answer(await answer, "fox")
    drained = await draining
    assert (drained.ended, drained.moved, drained.acknowledged) == (1, 0, 1)
    assert drained.seconds < LONG_S / 2, "it waits for the calls, not for the time"
    await harness.turn()
    records = await stack.records()
    assert [record.cells for record in records] == [["cell-0"], ["cell-1"]]
    assert max(record.held_s for record in records) < 0.01, "a call that just ends has been held by nobody"
    assert len(first.seen) == 1


@pytest.mark.parametrize("drain_s", [0.0, 0.4])
async def test_what_runs_on_is_moved_with_its_tokens_when_the_time_is_over(
    stack: ProxyStack, session: aiohttp.ClientSession, drain_s: float
) -> None:
    first, _, answer = await running_call(stack, session)
    second = await stack.open("cell-1")
    drained = await (await drain(stack, drain_s))
    assert (drained.ended, drained.moved) == (0, 1)
    assert drain_s <= drained.seconds < drain_s + 2
    again = await (await drain(stack, drain_s, epoch=3))
    assert (again.ended, again.moved) == (0, 0) and again.seconds < 2, "nothing was there to drain"
    await answer
    (record,) = await stack.records()
    whole = stack.renderer.tokenizer.encode(TURN, add_special_tokens=False).ids
    assert record.output_ids.tolist() == whole and record.resampled == 0
    assert second.seen[0].input_ids == first.seen[0].input_ids + whole[:3]
    assert record.cells == ["cell-0", "cell-1"]
    assert record.active_s >= drain_s > record.held_s or not drain_s, "until it was aborted it went on"


@pytest.mark.parametrize(("wait_s", "versions"), [(LONG_S, {1}), (0.2, {1, 2}), (0.0, {1, 2})])
async def test_an_update_waits_for_the_call_or_splits_its_turn(
    stack: ProxyStack, session: aiohttp.ClientSession, wait_s: float, versions: set[int]
) -> None:
    """`finish`, `finish` when the call takes longer than the update waits, and `continue`."""
    stack.replies = [call_text("a b c d e f g"), TURN]
    engine, harness, answer = await running_call(stack, session, version=1)
    draining = await drain(stack, wait_s)
    if wait_s == LONG_S:
        await asyncio.sleep(3 * QUICK.refresh_s)
        assert not draining.done(), "updated under the call"
        engine.gate.set()
    drained = await draining
    assert (drained.ended, drained.moved) == ((1, 0) if len(versions) == 1 else (0, 1))
    engine.gate.set()
    await stack.open("cell-0", version=2, epoch=2)
    harness.answer(await answer, "fox")
    await harness.turn()
    first, second = await stack.records()
    assert set(first.versions.tolist()) == versions and set(second.versions.tolist()) == {2}
    assert first.cells == ["cell-0"]


async def test_a_route_that_opens_again_interrupts_nothing_and_leaves_nothing_behind(
    stack: ProxyStack, session: aiohttp.ClientSession
) -> None:
    engine, _, answer = await running_call(stack, session)
    overtaken = await drain(stack, 0.5)
    await stack.open("cell-0", epoch=3)
    with pytest.raises(ApplicationError, match="overtaken by 3"):
        await overtaken
    await asyncio.sleep(1.0)  # longer than the first closing would have let it run
    draining = await drain(stack, 1.6, epoch=4)
    await asyncio.sleep(0.8)
    assert not draining.done(), "the time of the first closing was counted on"
    engine.gate.set()
    await answer
    drained = await draining
    assert (drained.ended, drained.moved) == (1, 0)
    (record,) = await stack.records()
    assert record.cells == ["cell-0"] and len(engine.seen) == 1


async def test_a_more_urgent_drain_cuts_the_time_short(stack: ProxyStack, session: aiohttp.ClientSession) -> None:
    _, _, answer = await running_call(stack, session)
    patient = await drain(stack, LONG_S)
    await stack.open("cell-1")
    drained = await (await drain(stack, 0.0, epoch=3))
    assert drained.moved == 1
    with pytest.raises(ApplicationError, match="overtaken by 3"):
        await patient
    await answer
    (record,) = await stack.records()
    assert record.cells == ["cell-0", "cell-1"]


async def test_a_proxy_that_cannot_read_routes_leaves_nothing_on_a_draining_cell(
    stack: ProxyStack, session: aiohttp.ClientSession
) -> None:
    _, _, answer = await running_call(stack, session)
    await stack.open("cell-1")
    draining = await drain(stack, LONG_S)
    router = stack.gateways[0].gateway.router
    following = list(router.tasks)
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)
    drained = await draining
    assert drained.expired == 1
    assert router.load("cell-0") == 0, "its lease is over, and its request still runs"
    await router.start()
    await answer
    (record,) = await stack.records()
    assert record.cells == ["cell-0", "cell-1"]
