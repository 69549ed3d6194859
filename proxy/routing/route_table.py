"""The routes as Redis has them, the engines behind them, and what each engine may be given.

Invariants. Reading the routes renews the proxy's own lease. A proxy that cannot read them for as long as that lease
lasts sends nothing to any cell.

It knows no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from pydantic import ValidationError
from redis.asyncio import Redis

from infra.sglang.errors import EngineError, EngineRefused
from infra.state import keys
from proxy.limits import Limits
from proxy.routing.admission import Window
from proxy.routing.engine import Engine, Reporting

log = logging.getLogger(__name__)


class RouteTable:
    """``connect`` makes the engine client of a route."""

    def __init__(self, redis: Redis, proxy_id: str, connect: Callable[[keys.Route], Engine], limits: Limits) -> None:
        self.routes: dict[str, keys.Route] = {}
        """By cell."""
        self.proxies: list[str] = []
        """Ids of the proxies that share the routes."""
        self.fresh_until = 0.0
        """Monotonic time at which the proxy's lease ends."""
        self.proxy_id = proxy_id
        self._redis, self._connect, self._limits = redis, connect, limits
        self._engines: dict[tuple[str, str], Engine] = {}
        self._windows: dict[tuple[str, str], Window] = {}
        self._silent: set[tuple[str, str]] = set()
        """Engines that don't report their load."""
        self._suspects: dict[tuple[str, str, int], float] = {}

    async def read(self) -> bool:
        """Renew the proxy's lease and read the routes. Returns whether any has changed."""
        asked = time.monotonic()
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(keys.proxy_lease(self.proxy_id), "alive", px=int(self._limits.lease_s * 1000))
        pipeline.sadd(keys.PROXIES, self.proxy_id)  # again each time: peers take out one that has stood still
        pipeline.hgetall(keys.ROUTES)
        pipeline.smembers(keys.PROXIES)
        _, _, stored, members = await pipeline.execute()
        before = self.routes
        self.routes = {name.decode(): route for name, data in stored.items() if (route := _read(data)) is not None}
        self.proxies = [name.decode() for name in members]
        self.fresh_until = asked + self._limits.lease_s
        return self.routes != before

    async def leave(self) -> None:
        """End the lease at once, so that nobody waits for this proxy."""
        await self._redis.delete(keys.proxy_lease(self.proxy_id))
        await self._redis.srem(keys.PROXIES, self.proxy_id)
        for engine in self._engines.values():
            await engine.close()

    def serving(self, min_version: int, max_version: int) -> list[keys.Route]:
        """Routes to which a call for these versions may go now."""
        now = time.monotonic()
        if now > self.fresh_until:
            return []
        return [
            route
            for route in self.routes.values()
            if route.open
            and min_version <= route.version <= max_version
            and self._suspects.get((route.cell, route.incarnation, route.epoch), 0.0) <= now
        ]

    def suspect(self, route: keys.Route) -> None:
        """The engine of a route failed: no new call goes there until the route changes or a pause is over."""
        self._suspects[route.cell, route.incarnation, route.epoch] = time.monotonic() + self._limits.suspect_s

    def window(self, route: keys.Route) -> Window:
        name = _engine_name(route)
        if name not in self._windows:
            self._windows[name] = Window(self._limits)
        return self._windows[name]

    def engine(self, route: keys.Route) -> Engine:
        name = _engine_name(route)
        if name not in self._engines:
            self._engines[name] = self._connect(route)
        return self._engines[name]

    async def look(self, route: keys.Route, proxies: int) -> None:
        """Ask an engine for its load; its window follows. ``proxies``: how many share it, this one included."""
        engine, name = self.engine(route), _engine_name(route)
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
            self.window(route).observe(load, time.monotonic(), proxies)

    def forget(self, in_use: Iterable[keys.Route]) -> list[Engine]:
        """Forget engines that no route names and no request uses; returns them, to be closed."""
        live = {_engine_name(route) for route in (*self.routes.values(), *in_use)}
        gone = [self._engines.pop(name) for name in list(self._engines) if name not in live]
        self._windows = {name: window for name, window in self._windows.items() if name in live}
        self._silent &= live
        now = time.monotonic()
        self._suspects = {name: until for name, until in self._suspects.items() if until > now}
        return gone


def _engine_name(route: keys.Route) -> tuple[str, str]:
    return route.url, route.incarnation


def _read(data: bytes) -> keys.Route | None:
    try:
        return keys.Route.model_validate_json(data)
    except ValidationError as fault:
        log.error("unreadable route %r: %s", data, fault)
        return None  # a route that cannot be read is not open
