"""Overload: cells get less, long-running episodes go first, nothing starves, nobody notices but by waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_parts import QUICK, Harness, ProxyStack, until
from redis.asyncio import Redis

from infra.sglang.client import Loads
from infra.sglang.errors import EngineLost, EngineRefused
from infra.state import keys
from proxy.errors import NoCell
from proxy.limits import Limits
from proxy.routing.admission import STEP, Window, rank
from proxy.routing.router import Router
from proxy.routing.slot import Slot
from workers.harness_check.engine import Script, ScriptedEngine, ScriptedTurn

MARKS = Limits(kv_low=0.85, kv_high=0.95, queue_s=10.0)
POOL = 64_000
IDLE, FULL, QUEUED = Loads(1, 0, 1000, POOL), Loads(9, 0, 63_000, POOL), Loads(9, 3, 50_000, POOL)
LIMITS = QUICK.model_copy(update={"load_s": 0.05, "queue_s": 0.2, "near_s": 0.4})


# The window, by itself


def strained(window: Window, *, now: float = 100.0) -> Window:
    window.observe(FULL, now)
    return window


def test_a_window_is_unlimited_until_the_engine_shows_pressure() -> None:
    window = Window(MARKS)
    for _ in range(1000):
        window.take(10_000)
    window.observe(IDLE, 1.0)
    assert window.room(10**9)


def test_kv_above_the_mark_halves_what_is_in_flight_and_ends_no_call() -> None:
    window = Window(MARKS)
    for _ in range(8):
        window.take(8000)
    strained(window)
    assert window.size == 32_000 and window.used == 64_000
    assert not window.room(1)


def test_a_queue_halves_the_window_only_when_it_lasts() -> None:
    window = Window(MARKS)
    window.take(8000)
    window.take(8000)
    for second in range(10):
        window.observe(QUEUED, float(second))
    window.observe(IDLE, 9.5)
    window.observe(QUEUED, 10.0)
    assert window.room(10**9), "no queue lasted for ten seconds"
    window.observe(QUEUED, 20.0)
    assert window.size == 8000


def test_a_cut_is_not_repeated_before_it_has_had_effect() -> None:
    window = Window(MARKS)
    for _ in range(4):
        window.take(8000)
    for second in range(100, 200):
        strained(window, now=float(second))
    assert window.size == 16_000, "what runs has not ended yet"
    for _ in range(3):
        window.give(8000)
    strained(window, now=300.0)
    assert window.size == 4000
    strained(window, now=301.0)
    assert window.size == 4000, "the engine's numbers are older than the cut"


@pytest.mark.parametrize(
    ("load", "wanted", "grows"),
    [(IDLE, True, True), (IDLE, False, False), (QUEUED, True, False), (Loads(9, 0, 58_000, POOL), True, False)],
)
def test_a_window_grows_only_when_wanted_and_the_engine_has_room(load: Loads, wanted: bool, grows: bool) -> None:
    window = Window(MARKS)
    window.take(32_000)
    before = strained(window).size
    window.wanted = wanted
    window.observe(load, 101.0)
    assert window.size == before + (POOL * STEP if grows else 0)


def test_proxies_share_the_step() -> None:
    grown = []
    for proxies in (1, 4):
        window = Window(MARKS)
        window.take(32_000)
        strained(window).wanted = True
        window.observe(IDLE, 101.0, proxies)
        grown.append(window.size - 16_000)
    assert grown == [POOL * STEP, POOL * STEP / 4]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, 2 * POOL)),
            st.tuples(st.just("give"), st.integers(0, 99)),
            st.tuples(st.just("look"), st.builds(Loads, *(st.integers(0, n) for n in (9, 3, 2 * POOL, POOL)))),
        ),
        max_size=80,
    )
)
def test_whatever_the_engine_says_an_empty_cell_takes_a_call(steps: list[tuple[str, Any]]) -> None:
    window, taken, now = Window(MARKS), list[int](), 0.0
    for what, value in steps:
        now += 4.0
        if what == "take" and window.room(value):
            window.take(value)
            taken.append(value)
        elif what == "give" and taken:
            window.give(taken.pop(value % len(taken)))
        elif what == "look":
            window.wanted = True
            window.observe(value, now)
        assert window.used == sum(taken) and window.calls == len(taken)
        assert window.size > 0
        assert window.room(10**9) or taken


@given(st.integers(0, 1000), st.floats(0, 1e5), st.integers(0, 1000), st.floats(0, 1e5), st.floats(0.1, 60))
def test_a_call_is_overtaken_only_by_longer_episodes_and_only_for_a_bounded_time(
    calls: int, since: float, other_calls: int, other_since: float, senior_s: float
) -> None:
    overtakes = other_since > since and rank(other_calls, other_since, senior_s) < rank(calls, since, senior_s)
    if overtakes:
        assert other_calls > calls
        assert other_since - since <= other_calls * senior_s
    assert rank(calls + 1, since, senior_s) < rank(calls, since, senior_s) < rank(calls, since + 1, senior_s)


class SimulatedEngine:
    """Stands in for an engine's KV pool: admits from its queue while there is room, each call for a fixed time."""

    def __init__(self, pool: int) -> None:
        self.pool = pool
        self.queue: list[tuple[int, float, Callable[[], None]]] = []
        self.running: list[tuple[float, int, Callable[[], None]]] = []

    @property
    def load(self) -> Loads:
        return Loads(len(self.running), len(self.queue), sum(tokens for _, tokens, _ in self.running), self.pool)

    def tick(self, now: float) -> None:
        for end, _, done in [run for run in self.running if run[0] <= now]:
            done()
            assert end <= now
        self.running = [run for run in self.running if run[0] > now]
        while self.queue and self.load.used_tokens + self.queue[0][0] <= self.pool:
            tokens, seconds, done = self.queue.pop(0)
            self.running.append((now + seconds, tokens, done))


@pytest.mark.parametrize("proxies", [1, 2, 8])
def test_several_proxies_settle_at_one_engine_without_a_word_between_them(proxies: int) -> None:
    engine = SimulatedEngine(1_000_000)
    windows = [Window(MARKS) for _ in range(proxies)]
    queued, busy, finished = [], [], 0

    def submit(window: Window, tokens: int) -> None:
        nonlocal finished
        window.take(tokens)

        def done() -> None:
            nonlocal finished
            finished += 1
            window.give(tokens)

        engine.queue.append((tokens, 20.0, done))

    for second in range(1200):  # demand without end: 40 calls a second would like in
        for number in range(40):
            window = windows[(second + number) % proxies]
            tokens = 10_000 + 1000 * (number % 7)
            if window.room(tokens):
                submit(window, tokens)
            else:
                window.wanted = True
        engine.tick(float(second))
        for window in windows:
            window.observe(engine.load, float(second), proxies)
        if second > 300:
            queued.append(engine.load.waiting > 0)
            busy.append(engine.load.used_tokens / engine.pool)
    assert sum(busy) / len(busy) > 0.6, "the engine is kept busy"
    assert sum(queued) / len(queued) < 0.25, "its queue is empty most of the time"
    assert len(engine.queue) * 13_000 < engine.pool, "and never long"
    shares = sorted(window.used for window in windows)
    assert shares[-1] < 6 * max(shares[0], 1)


# The router


class LoadedEngine(ScriptedEngine):
    """Scripted engine that also reports a scripted load."""

    def __init__(self, script: Script | None = None) -> None:
        super().__init__(script or Script(lambda prompt: ScriptedTurn([1])))
        self.load: Loads | Exception = IDLE
        self.asked: list[float] = []

    async def loads(self) -> Loads:
        self.asked.append(time.monotonic())
        if isinstance(self.load, Exception):
            raise self.load
        return self.load


class Cells:
    """A router with some cells."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.engines: dict[str, LoadedEngine] = {}
        self.router = Router(redis, "proxy-0", lambda route: self.engines[route.url], LIMITS)

    async def open(self, *cells: str) -> None:
        for cell in cells:
            self.engines[cell] = LoadedEngine()
            route = keys.Route(cell=cell, url=cell, incarnation="i0", epoch=1, open=True, version=0)
            await self.redis.hset(keys.ROUTES, cell, route.model_dump_json())
            await self.redis.publish(keys.ROUTES_CHANGED, cell)
        await until(lambda: set(cells) <= self.router.routes.keys(), "routes seen")

    async def strain(self, cell: str) -> Window:
        """Overload a cell until its window is cut."""
        window = self.router.window(cell)
        assert window is not None
        self.engines[cell].load = FULL
        before = window.size
        await until(lambda: window.size < before, "cut")
        return window

    def wait(self, slot: Slot, patience_s: float = 20.0) -> asyncio.Task[Slot]:
        async def granted() -> Slot:
            await self.router.grant(slot, time.monotonic() + patience_s)
            return slot

        return asyncio.create_task(granted())

    def take(self, slot: Slot) -> Slot:
        assert self.router.try_grant(slot)
        return slot


@pytest.fixture
async def cells(redis: Redis) -> AsyncIterator[Cells]:
    cells = Cells(redis)
    await cells.router.start()
    yield cells
    await cells.router.stop()


def slot(episode: str = "ep", tokens: int = 8000, *, version: int = 0, **more: Any) -> Slot:
    return Slot("r", episode, version, version, tokens=tokens, **more)


async def test_an_overloaded_cell_takes_no_call_until_it_has_room_again(cells: Cells) -> None:
    await cells.open("cell-0")
    slots = [cells.take(slot()) for _ in range(4)]
    await cells.strain("cell-0")
    assert not cells.router.try_grant(slot())
    waiting = cells.wait(slot())
    cells.router.release(slots.pop())
    cells.router.release(slots.pop())
    await asyncio.sleep(0)
    assert not waiting.done() and cells.router.waiting == 1, "the window is filled by the two that run"
    cells.router.release(slots.pop())
    assert (await waiting).route.cell == "cell-0" and cells.router.waiting == 0


async def test_a_waiting_call_gets_in_when_pressure_is_over_though_nothing_ended(cells: Cells) -> None:
    await cells.open("cell-0")
    for _ in range(4):
        cells.take(slot(tokens=500))
    window = await cells.strain("cell-0")
    waiting = cells.wait(slot(tokens=500))
    await asyncio.sleep(4 * LIMITS.load_s)
    assert not waiting.done()
    cells.engines["cell-0"].load = IDLE
    await waiting
    assert window.used == 2500


async def test_long_running_episodes_go_first_and_equals_in_their_order(cells: Cells) -> None:
    await cells.open("cell-0")
    slots = [cells.take(slot()) for _ in range(2)]
    await cells.strain("cell-0")
    order: list[str] = []
    tasks = []
    for name, calls in (("young", 0), ("younger", 0), ("old", 40), ("oldest", 200)):
        task = cells.wait(slot(name, seniority=calls))
        task.add_done_callback(lambda _, name=name: order.append(name))
        tasks.append(task)
        await asyncio.sleep(0.01)
    for taken in slots:
        cells.router.release(taken)
    for task in (tasks[3], tasks[2], tasks[0], tasks[1]):
        cells.router.release(await asyncio.wait_for(task, 5))
    assert order == ["oldest", "old", "young", "younger"]


async def test_small_calls_do_not_pass_a_large_one_that_waits(cells: Cells) -> None:
    await cells.open("cell-0")
    slots = [cells.take(slot(tokens=4000)) for _ in range(4)]
    await cells.strain("cell-0")
    large = cells.wait(slot("large", tokens=30_000, seniority=9))
    await asyncio.sleep(0)
    for taken in slots[:3]:
        cells.router.release(taken)
    assert not cells.router.try_grant(slot("small", tokens=10))
    small = cells.wait(slot("small", tokens=10))
    await asyncio.sleep(0.1)
    assert not large.done() and not small.done()
    cells.router.release(slots[3])
    assert (await large).tokens == 30_000, "larger than the window, but the cell is empty"


async def test_a_senior_call_passes_those_that_wait(cells: Cells) -> None:
    await cells.open("cell-0")
    cells.take(slot(tokens=4000))
    slots = [cells.take(slot(tokens=4000)) for _ in range(3)]
    await cells.strain("cell-0")
    junior = cells.wait(slot("junior", tokens=6000))
    await asyncio.sleep(0)
    for taken in slots:
        cells.router.release(taken)
    assert not junior.done(), "4000 of 8000 are used"
    cells.take(slot("senior", tokens=3000, seniority=100))
    junior.cancel()


async def test_a_call_waits_a_while_for_the_cell_that_has_its_prefix(cells: Cells) -> None:
    await cells.open("cell-0", "cell-1")
    slots = [cells.take(slot(near="cell-0")) for _ in range(3)]
    assert {taken.route.cell for taken in slots} == {"cell-0"}
    await cells.strain("cell-0")
    began = time.monotonic()
    late = await cells.wait(slot(near="cell-0"))
    assert late.route.cell == "cell-1"
    assert LIMITS.near_s <= time.monotonic() - began < LIMITS.near_s + 2
    assert cells.take(slot(near="")).route.cell == "cell-1", "one that knows no cell goes where there is room"


async def test_calls_that_wait_for_another_version_hold_up_nobody(cells: Cells) -> None:
    await cells.open("cell-0")
    later = [cells.wait(slot(f"later-{number}", version=1, seniority=900)) for number in range(2000)]
    await until(lambda: cells.router.waiting == 2000 and cells.router.table.serving(0, 0), "the routes are fresh")
    began = time.perf_counter()
    for _ in range(100):
        cells.router.release(cells.take(slot()))
    assert time.perf_counter() - began < 2.0
    assert cells.router.waiting == 2000
    for task in later:
        task.cancel()
    await asyncio.gather(*later, return_exceptions=True)
    assert cells.router.waiting == 0


async def test_engines_are_asked_seldom_and_only_while_there_is_work(cells: Cells) -> None:
    await cells.open("cell-0")
    engine = cells.engines["cell-0"]
    await asyncio.sleep(4 * LIMITS.load_s)
    assert not engine.asked
    taken = cells.take(slot())
    await until(lambda: len(engine.asked) >= 4, "asked")
    assert all(b - a >= 0.9 * LIMITS.load_s for a, b in zip(engine.asked, engine.asked[1:], strict=False))
    cells.router.release(taken)
    await asyncio.sleep(2 * LIMITS.load_s)
    asked = len(engine.asked)
    await asyncio.sleep(4 * LIMITS.load_s)
    assert len(engine.asked) == asked


async def test_an_engine_that_reports_no_load_is_not_asked_again_and_is_never_full(cells: Cells) -> None:
    await cells.open("cell-0")
    engine = cells.engines["cell-0"]
    engine.load = EngineRefused("/v1/loads", 404, "Not Found")
    for _ in range(50):
        cells.take(slot(tokens=10**6))
    await until(lambda: engine.asked, "asked")
    await asyncio.sleep(4 * LIMITS.load_s)
    assert len(engine.asked) == 1
    cells.take(slot(tokens=10**6))


async def test_a_load_that_is_not_known_changes_nothing(cells: Cells) -> None:
    await cells.open("cell-0")
    for _ in range(2):
        cells.take(slot())
    window = await cells.strain("cell-0")
    size = window.size
    cells.engines["cell-0"].load = EngineLost("away")
    asked = len(cells.engines["cell-0"].asked)
    await until(lambda: len(cells.engines["cell-0"].asked) > asked + 2, "asked on")
    assert window.size == size


async def test_a_wait_that_ends_as_room_comes_leaks_no_room(cells: Cells) -> None:
    await cells.open("cell-0")
    slots = [cells.take(slot()) for _ in range(2)]
    window = await cells.strain("cell-0")
    with pytest.raises(NoCell):
        await cells.wait(slot(), patience_s=0.1)
    waiting = cells.wait(slot())
    await asyncio.sleep(0)
    for taken in slots:
        cells.router.release(taken)  # grants the waiting call its slot
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (window.used, window.calls, cells.router.waiting, cells.router.load("cell-0")) == (0, 0, 0, 0)


# The whole proxy


async def test_a_call_without_room_is_held_with_pings_and_its_wait_is_not_charged(
    stack: ProxyStack, session: aiohttp.ClientSession
) -> None:
    engine = stack.engines["cell-0"] = LoadedEngine(stack.script)
    await stack.open("cell-0")
    proxy = await stack.proxy(LIMITS)
    engine.gate.clear()
    first, second = [Harness(proxy.url, await stack.key(episode), session) for episode in ("first", "second")]
    for harness in (first, second):
        harness.user("go")
    running = asyncio.create_task(first.turn())
    await until(lambda: engine.seen, "asked")
    engine.load = Loads(1, 0, 64, 64)
    window = proxy.gateway.router.window("cell-0")
    assert window is not None
    await until(lambda: window.size < 64, "cut")
    waiting = asyncio.create_task(second.post(stream=True))
    await until(lambda: stack.redis.hlen(keys.holding("second")), "held")
    await asyncio.sleep(3 * LIMITS.ping_s)
    assert len(engine.seen) == 1
    engine.gate.set()
    await running
    status, text = await waiting
    assert status == 200 and text.count(": keep-alive") >= 2 and text.endswith("data: [DONE]\n\n")
    (record,) = await stack.records("second")
    assert record.held_s >= 3 * LIMITS.ping_s
    assert record.active_s < record.held_s


# Peers


async def test_a_dead_proxy_is_noticed_by_all_and_leaves_the_list(redis: Redis) -> None:
    gone: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    routers = {
        name: Router(redis, name, lambda _: LoadedEngine(), LIMITS, on_peer_gone=gone[name].append) for name in gone
    }
    for router in routers.values():
        await router.start()
    await until(lambda: routers["a"]._peers.alive == 2 == routers["b"]._peers.alive, "all know each other")
    for task in list(routers["c"].tasks):  # it stands still: its lease runs out
        task.cancel()
    await until(lambda: gone["a"] == ["c"] == gone["b"], "noticed")
    assert await redis.smembers(keys.PROXIES) == {b"a", b"b"}
    await routers["c"].start()
    await until(lambda: redis.sismember(keys.PROXIES, "c"), "it is a member again as soon as it goes on")
    await until(lambda: routers["a"]._peers.alive == 2 == routers["b"]._peers.alive, "known again")
    await routers["c"].stop()
    await until(lambda: gone["a"] == ["c", "c"] == gone["b"], "a clean stop is noticed too")
    for name in ("a", "b"):
        await routers[name].stop()
    assert not await redis.smembers(keys.PROXIES)
