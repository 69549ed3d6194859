"""Which cell serves a call: the route table, leases on routes, and what happens when a route closes.

Invariants. A lease exists for every engine request, and is taken in the same event-loop step in which the route
was seen open. A closed route is acknowledged only when no lease on its cell is left. A proxy that cannot read the
routes for as long as its own lease lasts sends nothing to any cell.

It knows neither tokens nor episodes' contents.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import redis.exceptions
import xxhash
from pydantic import ValidationError
from redis.asyncio import Redis

from infra import keys
from infra.sglang.errors import EngineError
from proxy.engine import Engine
from proxy.errors import NoCell
from proxy.limits import Limits

log = logging.getLogger(__name__)
SLACK = 6
"""How many more calls than the least loaded cell the preferred one may have."""


@dataclass(eq=False)
class Lease:
    """The right to send one request to a cell, until ``revoked_at`` is set."""

    route: keys.Route
    engine: Engine
    rid: str
    revoked_at: float | None = None
    """Monotonic time at which the route closed under the request."""
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


class Router:
    """Start with ``start``, end with ``stop``. ``connect`` makes the engine client of a route."""

    def __init__(self, redis: Redis, proxy_id: str, connect: Callable[[keys.Route], Engine], limits: Limits) -> None:
        self.proxy_id = proxy_id
        self.routes: dict[str, keys.Route] = {}
        self.waiting = 0
        self._redis, self._connect, self._limits = redis, connect, limits
        self._engines: dict[tuple[str, str], Engine] = {}
        self._leases: dict[str, set[Lease]] = {}
        self._suspects: dict[tuple[str, str, int], float] = {}
        self._acknowledged: dict[str, str] = {}
        self._fresh_until = 0.0
        self._changed = asyncio.Event()
        self._poke = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._redis.sadd(keys.PROXIES, self.proxy_id)
        await self._refresh()
        self._spawn(self._keep_fresh())
        self._spawn(self._listen())

    async def stop(self) -> None:
        """Stop following routes; the lease ends at once, so that nobody waits for this proxy."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._redis.delete(keys.proxy_lease(self.proxy_id))
        for engine in self._engines.values():
            await engine.close()

    def load(self, cell: str) -> int:
        """Requests of this proxy on a cell."""
        return len(self._leases.get(cell, ()))

    def engine_of(self, cell: str) -> Engine | None:
        route = self.routes.get(cell)
        return None if route is None else self._engine(route)

    def try_lease(self, wish: Wish, rid: str) -> Lease | None:
        """A lease on the best cell that serves the wished version now, or None."""
        route = self._pick(wish)
        if route is None:
            return None
        lease = Lease(route, self._engine(route), rid)
        self._leases.setdefault(route.cell, set()).add(lease)
        return lease

    async def lease(self, wish: Wish, rid: str, deadline: float) -> Lease:
        """As ``try_lease``, but waits until ``deadline`` (monotonic seconds); then raises NoCell."""
        self.waiting += 1
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                while (lease := self.try_lease(wish, rid)) is None:
                    await self._changed.wait()
                return lease
        except TimeoutError:
            window = f"[{wish.min_version}, {wish.max_version}]"
            raise NoCell(f"no cell served a version in {window} in time") from None
        finally:
            self.waiting -= 1

    def release(self, lease: Lease) -> None:
        """The request of a lease is over."""
        lease.over.set()
        self._leases[lease.route.cell].discard(lease)
        if lease.revoked_at is not None:
            self._poke.set()

    def suspect(self, route: keys.Route) -> None:
        """The engine of a route failed: no new call goes there until the route changes or a pause is over."""
        self._suspects[route.cell, route.incarnation, route.epoch] = time.monotonic() + self._limits.suspect_s

    def _pick(self, wish: Wish) -> keys.Route | None:
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
        if not fit:
            return None
        least = min(self.load(route.cell) for route in fit)
        fit = [route for route in fit if self.load(route.cell) <= least + SLACK]
        for route in fit:
            if route.cell == wish.near:
                return route
        return max(fit, key=lambda route: xxhash.xxh3_64_intdigest(f"{wish.episode} {route.cell}".encode()))

    def _engine(self, route: keys.Route) -> Engine:
        name = (route.url, route.incarnation)
        if name not in self._engines:
            self._engines[name] = self._connect(route)
        return self._engines[name]

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
        pipeline.hgetall(keys.ROUTES)
        pipeline.set(keys.proxy_lease(self.proxy_id), "alive", px=int(self._limits.lease_s * 1000))
        found, _ = await pipeline.execute()
        routes = {name.decode(): route for name, data in found.items() if (route := _read(data)) is not None}
        self._fresh_until = asked + self._limits.lease_s
        changed = routes != self.routes
        self.routes = routes
        self._revoke()
        if changed or self.waiting:
            self._changed.set()
            self._changed = asyncio.Event()
        if changed:
            self._forget_engines()
        await self._acknowledge()

    def _revoke(self) -> None:
        for cell, leases in self._leases.items():
            route = self.routes.get(cell)
            for lease in leases:
                served = lease.route
                same = (
                    route is not None
                    and route.open
                    and (route.incarnation, route.version) == (served.incarnation, served.version)
                )
                if not same and lease.revoked_at is None:
                    lease.revoked_at = time.monotonic()
                    self._spawn(self._end(lease))

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
            await self._redis.hset(keys.route_acks(cell), self.proxy_id, name)
            self._acknowledged[cell] = name

    def _forget_engines(self) -> None:
        live = {(route.url, route.incarnation) for route in self.routes.values()}
        live |= {(lease.route.url, lease.route.incarnation) for leases in self._leases.values() for lease in leases}
        for name in [name for name in self._engines if name not in live]:
            self._spawn(self._engines.pop(name).close())
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
