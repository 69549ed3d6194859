"""Which cell serves a call: the route table, the queue of calls that wait, and the revocation of slots, put together.

A slot exists for every engine request. The router follows Redis: a notice of a change, or some time without one, makes
it read the routes, revoke what may not go on, serve who waits, and acknowledge closed routes that are empty.

It knows neither what the tokens are nor episodes' contents.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import redis.exceptions
from redis.asyncio import Redis

from infra.state import keys
from proxy.limits import Limits
from proxy.routing.admission import Window
from proxy.routing.engine import Engine
from proxy.routing.peers import Peers
from proxy.routing.revocation import Revocation
from proxy.routing.route_table import RouteTable
from proxy.routing.tasks import Tasks
from proxy.routing.waiting_queue import WaitingQueue

log = logging.getLogger(__name__)


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
        self.on_peer_gone = on_peer_gone
        self.tasks = Tasks()
        self.table = RouteTable(redis, proxy_id, connect, limits)
        self._redis, self._limits = redis, limits
        self._peers = Peers(redis, proxy_id)
        self._poke = asyncio.Event()
        self._revocation = Revocation(redis, self.table, limits, self.tasks, self._poke.set)
        self._queue = WaitingQueue(self.table, self._revocation, limits)
        self.load = self._revocation.load
        self.try_grant = self._queue.try_grant
        self.grant = self._queue.grant
        self.release = self._queue.release
        self.suspect = self.table.suspect

    async def start(self) -> None:
        await self._refresh()
        for work in (self._keep_fresh(), self._listen(), self._watch_loads()):
            self.tasks.start(work)

    async def stop(self) -> None:
        await self.tasks.end()
        self._revocation.stop()
        await self.table.leave()

    @property
    def waiting(self) -> int:
        """Calls that wait for a cell, or for room on one."""
        return len(self._queue)

    @property
    def routes(self) -> dict[str, keys.Route]:
        """By cell."""
        return self.table.routes

    def window(self, cell: str) -> Window | None:
        """What this proxy may use of the engine that now serves a cell; None when none does."""
        route = self.routes.get(cell)
        return None if route is None else self.table.window(route)

    def engine_of(self, cell: str) -> Engine | None:
        route = self.routes.get(cell)
        return None if route is None else self.table.engine(route)

    async def _watch_loads(self) -> None:
        while True:
            await asyncio.sleep(self._limits.load_s)  # engines don't tell by themselves: they are asked, seldom
            busy = [route for route in self.routes.values() if route.open and (self.waiting or self.load(route.cell))]
            await asyncio.gather(*(self.table.look(route, 1 + self._peers.alive) for route in busy))
            self._queue.serve()

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
        changed = await self.table.read()
        self._revocation.observe()
        self._queue.serve()
        if changed:
            for engine in self.table.forget(self._revocation.routes_in_use):
                self.tasks.start(engine.close())
        await self._revocation.acknowledge()
        for peer in await self._peers.look(self.table.proxies):
            if self.on_peer_gone is not None:
                self.on_peer_gone(peer)
