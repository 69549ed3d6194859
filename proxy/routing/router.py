"""Which cell serves a call: the route table, leases on routes, and what happens when a route closes.

Invariants. A lease exists for every engine request, and is taken in the same event-loop step in which the route
was seen open. A closed route is acknowledged only when no lease on its cell is left; until then its requests may end
by themselves, for as long as the route says (``drains``). A proxy that cannot read the routes for as long as its own
lease lasts sends nothing to any cell, and leaves nothing on a closed one. No call passes another on a cell for which
that one waits, whatever their sizes: the order is ``admission.rank``'s.

It knows neither what the tokens are nor episodes' contents.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import insort
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import redis.exceptions
import xxhash
from pydantic import ValidationError
from redis.asyncio import Redis

from infra.sglang.errors import EngineError, EngineRefused
from infra.state import keys
from proxy.errors import NoCell
from proxy.limits import Limits
from proxy.routing.admission import Marks, Window, rank
from proxy.routing.drains import Drains
from proxy.routing.ending import end
from proxy.routing.engine import Engine, Reporting
from proxy.routing.peers import Peers

log = logging.getLogger(__name__)
SLACK = 6
"""How many more calls than the least loaded cell the preferred one may have."""
ENDING = 0.25
"""Share of the proxy's lease that is left for ending requests when it can't be renewed."""


@dataclass(eq=False)
class Lease:
    """The right to send one request to a cell, until ``revoked_at`` is set."""

    route: keys.Route
    engine: Engine
    rid: str
    window: Window
    """Of the engine; holds ``tokens`` for as long as the lease lasts."""
    tokens: int
    revoked_at: float | None = None
    """Monotonic time from which the request is aborted, because its route has closed or changed."""
    task: asyncio.Future[Any] | None = None
    """The engine request; cancelled when the engine does not end it after an abort."""
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Wish:
    """What a call needs. ``near``: the cell that has its prefix, "" for none."""

    episode: str
    min_version: int
    max_version: int
    near: str
    tokens: int = 1
    """Of the prompt: what the call takes of a cell's window."""
    seniority: int = 0
    """Calls that the episode has made."""
    since: float = field(default_factory=time.monotonic)
    """Monotonic time at which the call came; kept when it moves to another cell."""


@dataclass(order=True)
class _Waiter:
    place: float
    serial: int
    wish: Wish = field(compare=False)
    rid: str = field(compare=False)
    granted: asyncio.Future[Lease] = field(compare=False)


class Router:
    """Start with ``start``, end with ``stop``. ``connect`` makes the engine client of a route.

    ``on_peer_gone`` gets the id of each other proxy that has died or stopped, soon after its lease is gone.
    """

    def __init__(
        self,
        redis: Redis,
        proxy_id: str,
        connect: Callable[[keys.Route], Engine],
        limits: Limits,
        on_peer_gone: Callable[[str], None] | None = None,
    ) -> None:
        self.proxy_id = proxy_id
        self.routes: dict[str, keys.Route] = {}
        self.on_peer_gone = on_peer_gone
        self._peers = Peers(redis, proxy_id)
        self._redis, self._connect, self._limits = redis, connect, limits
        self._engines: dict[tuple[str, str], Engine] = {}
        self._leases: dict[str, set[Lease]] = {}
        self._suspects: dict[tuple[str, str, int], float] = {}
        self._drains = Drains()
        self._next_revocation: asyncio.TimerHandle | None = None
        self._acknowledged: dict[str, str] = {}
        self._fresh_until = 0.0
        self._marks = Marks(limits.kv_low, limits.kv_high, limits.queue_s)
        self._windows: dict[tuple[str, str], Window] = {}
        self._silent: set[tuple[str, str]] = set()
        self._waiters: list[_Waiter] = []
        self._serials = count()
        self._poke = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._refresh()
        self._spawn(self._keep_fresh())
        self._spawn(self._listen())
        self._spawn(self._watch_loads())

    async def stop(self) -> None:
        """Stop following routes; the lease ends at once, so that nobody waits for this proxy."""
        await end(self._tasks)
        self._revoke_at(math.inf)
        await self._redis.delete(keys.proxy_lease(self.proxy_id))
        await self._redis.srem(keys.PROXIES, self.proxy_id)
        for engine in self._engines.values():
            await engine.close()

    @property
    def waiting(self) -> int:
        """Calls that wait for a cell, or for room on one."""
        return len(self._waiters)

    def load(self, cell: str) -> int:
        """Requests of this proxy on a cell."""
        return len(self._leases.get(cell, ()))

    def window(self, cell: str) -> Window | None:
        """What this proxy may use of the engine that now serves a cell; None when none does."""
        route = self.routes.get(cell)
        return None if route is None else self._window(route)

    def engine_of(self, cell: str) -> Engine | None:
        route = self.routes.get(cell)
        return None if route is None else self._engine(route)

    def try_lease(self, wish: Wish, rid: str) -> Lease | None:
        """A lease on the best cell that serves the wished version and has room now, or None."""
        full = self._serve_waiters(before=self._place(wish))
        route = self._pick(wish, full)
        return None if route is None else self._take(route, wish, rid)

    async def lease(self, wish: Wish, rid: str, deadline: float) -> Lease:
        """As ``try_lease``, but waits until ``deadline`` (monotonic seconds); then raises NoCell."""
        granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(self._place(wish), next(self._serials), wish, rid, granted)
        insort(self._waiters, waiter)
        lease: Lease | None = None
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                self._serve_waiters()
                lease = await granted
        except TimeoutError:
            window = f"[{wish.min_version}, {wish.max_version}]"
            raise NoCell(f"no cell had room under a version in {window} in time") from None
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if lease is None and granted.done() and not granted.cancelled():  # granted as the wait ended
                self.release(granted.result())
        return lease

    def release(self, lease: Lease) -> None:
        """The request of a lease is over."""
        lease.over.set()
        self._leases[lease.route.cell].discard(lease)
        lease.window.give(lease.tokens)
        moved = lease.revoked_at is not None
        if self._drains.count(lease.route.cell, moved=moved) or moved:
            self._poke.set()
        self._serve_waiters()

    def suspect(self, route: keys.Route) -> None:
        """The engine of a route failed: no new call goes there until the route changes or a pause is over."""
        self._suspects[route.cell, route.incarnation, route.epoch] = time.monotonic() + self._limits.suspect_s

    def _place(self, wish: Wish) -> float:
        return rank(wish.seniority, wish.since, self._limits.senior_s)

    def _serve_waiters(self, before: float = math.inf) -> set[str]:
        """Give waiting calls whose place is up to ``before`` their leases, in order, as far as there is room.

        Returns the cells for which one of them goes on waiting: nobody behind it may have those.
        """
        full: set[str] = set()
        if not self._waiters:
            return full
        serving = {route.cell: route.version for route in self.routes.values() if route.open}
        unserved: set[tuple[int, int]] = set()  # a whole step may wait for its version: it is looked at once
        for waiter in list(self._waiters):
            if waiter.place > before or full >= serving.keys():
                break
            versions = (waiter.wish.min_version, waiter.wish.max_version)
            if versions in unserved:
                continue
            if not any(versions[0] <= version <= versions[1] for version in serving.values()):
                unserved.add(versions)
                continue
            route = self._pick(waiter.wish, full)
            if route is not None:
                self._waiters.remove(waiter)
                if not waiter.granted.done():  # else its caller has just given up
                    waiter.granted.set_result(self._take(route, waiter.wish, waiter.rid))
        return full

    def _take(self, route: keys.Route, wish: Wish, rid: str) -> Lease:
        lease = Lease(route, self._engine(route), rid, self._window(route), wish.tokens)
        lease.window.take(lease.tokens)
        self._leases.setdefault(route.cell, set()).add(lease)
        return lease

    def _pick(self, wish: Wish, full: set[str]) -> keys.Route | None:
        """The best cell with room that isn't ``full``; cells that lack the room are added to it."""
        now = time.monotonic()
        if now > self._fresh_until:
            return None
        fit = [
            route
            for route in self.routes.values()
            if route.open
            and wish.min_version <= route.version <= wish.max_version
            and self._suspects.get((route.cell, route.incarnation, route.epoch), 0.0) <= now
        ]
        for route in fit:
            window = self._window(route)
            if route.cell not in full and not window.room(wish.tokens):
                window.wanted = True
                full.add(route.cell)
        near = next((route for route in self._balanced(fit) if route.cell == wish.near), None)
        if near is not None and (near.cell not in full or now < wish.since + self._limits.near_s):
            return near if near.cell not in full else None
        fit = self._balanced([route for route in fit if route.cell not in full])
        if not fit:
            return None
        return max(fit, key=lambda route: xxhash.xxh3_64_intdigest(f"{wish.episode} {route.cell}".encode()))

    def _balanced(self, routes: list[keys.Route]) -> list[keys.Route]:
        least = min((self.load(route.cell) for route in routes), default=0)
        return [route for route in routes if self.load(route.cell) <= least + SLACK]

    def _window(self, route: keys.Route) -> Window:
        name = (route.url, route.incarnation)
        if name not in self._windows:
            self._windows[name] = Window(self._marks)
        return self._windows[name]

    def _engine(self, route: keys.Route) -> Engine:
        name = (route.url, route.incarnation)
        if name not in self._engines:
            self._engines[name] = self._connect(route)
        return self._engines[name]

    async def _watch_loads(self) -> None:
        while True:
            await asyncio.sleep(self._limits.load_s)  # engines don't tell by themselves: they are asked, seldom
            busy = [route for route in self.routes.values() if route.open and (self._waiters or self.load(route.cell))]
            await asyncio.gather(*(self._look(route) for route in busy))
            self._serve_waiters()

    async def _look(self, route: keys.Route) -> None:
        engine, name = self._engine(route), (route.url, route.incarnation)
        if name in self._silent or not isinstance(engine, Reporting):
            return
        try:
            async with asyncio.timeout(self._limits.load_answer_s):
                load = await engine.loads()
        except EngineRefused as refusal:
            if refusal.status == 404:
                self._silent.add(name)
            log.warning("%s does not tell its load: %s", route.cell, refusal)
        except (EngineError, TimeoutError) as fault:
            log.warning("the load of %s is not known: %s", route.cell, fault)
        else:
            self._window(route).observe(load, time.monotonic(), 1 + self._peers.alive)

    async def _keep_fresh(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._limits.refresh_s):
                    await self._poke.wait()
            except TimeoutError:
                pass  # time to read again without a notice
            self._poke.clear()
            try:
                async with asyncio.timeout(self._limits.lease_s):
                    await self._refresh()
            except (redis.exceptions.RedisError, OSError) as fault:  # TimeoutError is an OSError
                log.warning("routes could not be read: %s", fault)
                await asyncio.sleep(self._limits.refresh_s)

    async def _listen(self) -> None:
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    await channel.subscribe(keys.ROUTES_CHANGED)
                    async for _ in channel.listen():
                        self._poke.set()
            except (redis.exceptions.RedisError, OSError) as fault:
                log.warning("route notices interrupted: %s", fault)
                await asyncio.sleep(self._limits.refresh_s)

    async def _refresh(self) -> None:
        asked = time.monotonic()
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(keys.proxy_lease(self.proxy_id), "alive", px=int(self._limits.lease_s * 1000))
        pipeline.sadd(keys.PROXIES, self.proxy_id)  # again each time: peers take out one that has stood still
        pipeline.hgetall(keys.ROUTES)
        pipeline.smembers(keys.PROXIES)
        _, _, found, members = await pipeline.execute()
        routes = {name.decode(): route for name, data in found.items() if (route := _read(data)) is not None}
        self._fresh_until = asked + self._limits.lease_s
        changed = routes != self.routes
        self.routes = routes
        self._drains.observe(routes, time.monotonic())
        self._revoke()
        self._serve_waiters()
        if changed:
            self._forget_engines()
        await self._acknowledge()
        for peer in await self._peers.look(name.decode() for name in members):
            if self.on_peer_gone is not None:
                self.on_peer_gone(peer)

    def _revoke(self) -> None:
        """End what may no longer go on, and come back when the next request's time is over."""
        now, following = time.monotonic(), math.inf
        for cell, leases in self._leases.items():
            route = self.routes.get(cell)
            for lease in leases:
                if lease.revoked_at is not None:
                    continue
                until = self._drains.until(lease.route, route)
                if until < math.inf:  # a draining cell waits for this proxy only as long as its own lease lasts
                    until = min(until, self._fresh_until - ENDING * self._limits.lease_s)
                if until <= now:
                    lease.revoked_at = now
                    self._spawn(self._end(lease))
                else:
                    following = min(following, until)
        self._revoke_at(following)

    def _revoke_at(self, moment: float) -> None:
        if self._next_revocation is not None:
            self._next_revocation.cancel()
            self._next_revocation = None
        if moment < math.inf:
            delay = max(0.0, moment - time.monotonic())
            self._next_revocation = asyncio.get_running_loop().call_later(delay, self._revoke)

    async def _end(self, lease: Lease) -> None:
        """Make the engine give up a request; if it doesn't, cancel the request."""
        try:
            async with asyncio.timeout(self._limits.revoke_s):
                while not lease.over.is_set():
                    await lease.engine.abort(lease.rid, self._limits.revoke_s)
                    try:  # an abort that overtakes its request is forgotten by the engine, so it is repeated
                        async with asyncio.timeout(0.2):
                            await lease.over.wait()
                    except TimeoutError:
                        continue
        except (EngineError, TimeoutError) as fault:
            log.warning("%s did not end request %s: %s", lease.route.cell, lease.rid, fault)
            if lease.task is not None:
                lease.task.cancel()

    async def _acknowledge(self) -> None:
        for cell, route in self.routes.items():
            name = f"{route.incarnation}:{route.epoch}"
            if route.open or self._leases.get(cell) or self._acknowledged.get(cell) == name:
                continue
            pipeline = self._redis.pipeline()
            pipeline.hset(keys.route_drains(cell), self.proxy_id, self._drains.of(cell).model_dump_json())
            pipeline.hset(keys.route_acks(cell), self.proxy_id, name)
            await pipeline.execute()
            self._drains.told(cell)
            self._acknowledged[cell] = name

    def _forget_engines(self) -> None:
        live = {(route.url, route.incarnation) for route in self.routes.values()}
        live |= {(lease.route.url, lease.route.incarnation) for leases in self._leases.values() for lease in leases}
        for name in [name for name in self._engines if name not in live]:
            self._spawn(self._engines.pop(name).close())
        self._windows = {name: window for name, window in self._windows.items() if name in live}
        self._silent &= live
        now = time.monotonic()
        self._suspects = {name: until for name, until in self._suspects.items() if until > now}

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("the router's task ended", exc_info=fault)


def _read(data: bytes) -> keys.Route | None:
    try:
        return keys.Route.model_validate_json(data)
    except ValidationError as fault:
        log.error("unreadable route %r: %s", data, fault)
        return None  # a route that cannot be read is not open
