"""What happens to the slots on a cell when its route closes.

Invariants. A closed route is acknowledged only when no slot on its cell is left; until then its requests may end by
themselves, for as long as the route says (``drains``). A proxy whose lease runs out leaves nothing on a closed route.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from redis.asyncio import Redis

from infra.sglang.errors import EngineError
from infra.state import keys
from proxy.limits import Limits
from proxy.routing.drains import Drains
from proxy.routing.route_table import RouteTable
from proxy.routing.slot import Slot
from proxy.routing.tasks import Tasks

log = logging.getLogger(__name__)
ENDING = 0.25
"""Share of the proxy's lease that is left for ending requests when it can't be renewed."""
ABORT_AGAIN_S = 0.2


class Revocation:
    """``on_emptier``: called when a slot on a closed route is released, so that it is acknowledged soon."""

    def __init__(
        self, redis: Redis, table: RouteTable, limits: Limits, tasks: Tasks, on_emptier: Callable[[], None]
    ) -> None:
        self._redis, self._table, self._limits, self._tasks = redis, table, limits, tasks
        self._on_emptier = on_emptier
        self._slots: dict[str, set[Slot]] = {}
        self._drains = Drains()
        self._timer: asyncio.TimerHandle | None = None
        self._acknowledged: dict[str, str] = {}

    def load(self, cell: str) -> int:
        """Requests of this proxy on a cell."""
        return len(self._slots.get(cell, ()))

    @property
    def routes_in_use(self) -> list[keys.Route]:
        return [slot.route for slots in self._slots.values() for slot in slots]

    def add(self, slot: Slot) -> None:
        """A slot was granted."""
        self._slots.setdefault(slot.route.cell, set()).add(slot)

    def discard(self, slot: Slot) -> None:
        """A slot was released."""
        self._slots[slot.route.cell].discard(slot)
        moved = slot.revoked_at is not None
        if self._drains.count(slot.route.cell, moved=moved) or moved:
            self._on_emptier()

    def observe(self) -> None:
        """The routes were read."""
        self._drains.observe(self._table.routes, time.monotonic())
        self._revoke()

    async def acknowledge(self) -> None:
        """Tell of every closed route on which nothing is left, once."""
        for cell, route in self._table.routes.items():
            name = f"{route.incarnation}:{route.epoch}"
            if route.open or self._slots.get(cell) or self._acknowledged.get(cell) == name:
                continue
            pipeline = self._redis.pipeline()
            pipeline.hset(keys.route_drains(cell), self._table.proxy_id, self._drains.of(cell).model_dump_json())
            pipeline.hset(keys.route_acks(cell), self._table.proxy_id, name)
            await pipeline.execute()
            self._drains.told(cell)
            self._acknowledged[cell] = name

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _revoke(self) -> None:
        """End what may no longer go on, and come back when the next request's time is over."""
        now, following = time.monotonic(), math.inf
        for cell, slots in self._slots.items():
            route = self._table.routes.get(cell)
            for slot in slots:
                if slot.revoked_at is not None:
                    continue
                until = self._drains.until(slot.route, route)
                if until < math.inf:  # a draining cell waits for this proxy only as long as its own lease lasts
                    until = min(until, self._table.fresh_until - ENDING * self._limits.lease_s)
                if until <= now:
                    slot.revoked_at = now
                    self._tasks.start(self._end(slot))
                else:
                    following = min(following, until)
        self.stop()
        if following < math.inf:
            delay = max(0.0, following - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._revoke)

    async def _end(self, slot: Slot) -> None:
        """Make the engine give up a request; if it doesn't, cancel the request."""
        try:
            async with asyncio.timeout(self._limits.revoke_s):
                while not slot.over.is_set():
                    await slot.engine.abort(slot.rid, self._limits.revoke_s)
                    try:  # an abort that overtakes its request is forgotten by the engine, so it is repeated
                        async with asyncio.timeout(ABORT_AGAIN_S):
                            await slot.over.wait()
                    except TimeoutError:
                        continue
        except (EngineError, TimeoutError) as fault:
            log.warning("%s did not end request %s: %s", slot.route.cell, slot.rid, fault)
            if slot.request is not None:
                slot.request.cancel()
