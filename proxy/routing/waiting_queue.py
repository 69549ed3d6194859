"""Which cell a call goes to, and which of the calls that wait is next.

Invariants. A slot is granted in the same event-loop step in which its route was seen open. No call passes another on a
cell for which that one waits, whatever their sizes: the order is ``admission.rank``'s.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import insort
from dataclasses import dataclass, field
from itertools import count

import xxhash

from infra.state.keys import Route
from proxy.errors import NoCell
from proxy.limits import Limits
from proxy.routing.admission import rank
from proxy.routing.revocation import Revocation
from proxy.routing.route_table import RouteTable
from proxy.routing.slot import Slot

SLACK = 6
"""How many more calls than the least loaded cell the preferred one may have."""


@dataclass(order=True)
class _Waiter:
    rank: float
    serial: int
    versions: tuple[int, int] = field(compare=False)
    slot: Slot = field(compare=False)
    granted: asyncio.Future[None] = field(compare=False)


class WaitingQueue:
    """Grants slots, and takes them back."""

    def __init__(self, table: RouteTable, revocation: Revocation, limits: Limits) -> None:
        self._table, self._revocation, self._limits = table, revocation, limits
        self._waiters: list[_Waiter] = []
        self._serials = count()

    def __len__(self) -> int:
        return len(self._waiters)

    def try_grant(self, slot: Slot) -> bool:
        """Grant a slot on the best cell that serves its versions and has room now."""
        full = self.serve(up_to=self._rank(slot))
        return self._grant(slot, full)

    async def grant(self, slot: Slot, deadline: float) -> None:
        """As ``try_grant``, but waits until ``deadline`` (monotonic seconds); then raises NoCell."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        versions = (slot.min_version, slot.max_version)
        waiter = _Waiter(self._rank(slot), next(self._serials), versions, slot, granted)
        insort(self._waiters, waiter)
        taken = False
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                self.serve()
                await granted
            taken = True
        except TimeoutError:
            raise NoCell(f"no cell had room under a version in {list(versions)} in time") from None
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if not taken and granted.done() and not granted.cancelled():  # granted as the wait ended
                self.release(slot)

    def release(self, slot: Slot) -> None:
        """The request of a slot is over."""
        slot.over.set()
        slot.window.give(slot.tokens)
        self._revocation.discard(slot)
        self.serve()

    def serve(self, up_to: float = math.inf) -> set[str]:
        """Give waiting calls whose rank is at most ``up_to`` their slots, in order, as far as there is room.

        Returns the cells for which one of them goes on waiting: nobody behind it may have those.
        """
        full: set[str] = set()
        if not self._waiters:
            return full
        serving = {route.cell: route.version for route in self._table.routes.values() if route.open}
        unserved: set[tuple[int, int]] = set()  # a whole step may wait for its version: it is looked at once
        for waiter in list(self._waiters):
            if waiter.rank > up_to or full >= serving.keys():
                break
            if waiter.versions in unserved or waiter.granted.done():  # done: its caller has just given up
                continue
            least, most = waiter.versions
            if not any(least <= version <= most for version in serving.values()):
                unserved.add(waiter.versions)
            elif self._grant(waiter.slot, full):
                self._waiters.remove(waiter)
                waiter.granted.set_result(None)
        return full

    def _rank(self, slot: Slot) -> float:
        return rank(slot.seniority, slot.since, self._limits.senior_s)

    def _grant(self, slot: Slot, full: set[str]) -> bool:
        route = self._pick(slot, full)
        if route is None:
            return False
        slot.route, slot.engine, slot.window = route, self._table.engine(route), self._table.window(route)
        slot.window.take(slot.tokens)
        self._revocation.add(slot)
        return True

    def _pick(self, slot: Slot, full: set[str]) -> Route | None:
        """The best cell with room that isn't ``full``; cells that lack the room are added to it."""
        fit = self._table.serving(slot.min_version, slot.max_version)
        for route in fit:
            window = self._table.window(route)
            if route.cell not in full and not window.room(slot.tokens):
                window.wanted = True
                full.add(route.cell)
        near = next((route for route in self._balanced(fit) if route.cell == slot.near), None)
        if near is not None and (near.cell not in full or time.monotonic() < slot.since + self._limits.near_s):
            return near if near.cell not in full else None
        fit = self._balanced([route for route in fit if route.cell not in full])
        return max(
            fit, key=lambda route: xxhash.xxh3_64_intdigest(f"{slot.episode} {route.cell}".encode()), default=None
        )

    def _balanced(self, routes: list[Route]) -> list[Route]:
        loads = {route.cell: self._revocation.load(route.cell) for route in routes}
        least = min(loads.values(), default=0)
        return [route for route in routes if loads[route.cell] <= least + SLACK]
