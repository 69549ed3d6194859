"""How long requests on a closed route may go on, and what became of them.

A route that closes leaves its requests some time to end by themselves: a call that ends has reached a tool boundary,
nothing is recomputed, and the episode's next call goes to another cell. What is left when the time is over is aborted.

Invariants. The time is counted from when this proxy first saw the route closed, and however often it is closed again
before it opens, never anew; it is as long as the newest closing says. Opening ends it: nothing of an earlier closing is
left. Another engine, or the same one under other weights, leaves no time at all.

Pure: no clock, no I/O. Times are monotonic seconds. It knows nothing of leases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from infra.state.keys import Drained, Route


@dataclass
class _Drain:
    since: float
    ended: int = 0
    moved: int = 0


class Drains:
    """Of every closed route, for one proxy."""

    def __init__(self) -> None:
        self._drains: dict[str, _Drain] = {}

    def observe(self, routes: Mapping[str, Route], now: float) -> None:
        """Take note of which routes are closed."""
        closed = [cell for cell, route in routes.items() if not route.open]
        self._drains = {cell: self._drains.get(cell) or _Drain(now) for cell in closed}

    def until(self, served: Route, route: Route | None) -> float:
        """Time until which a request may go on that was sent under ``served``, now that the route is ``route``."""
        if route is None or (route.incarnation, route.version) != (served.incarnation, served.version):
            return -math.inf
        if route.open:
            return math.inf
        return self._drains[route.cell].since + route.drain_s

    def count(self, cell: str, *, moved: bool) -> bool:
        """A request on the cell is over; returns whether the cell's route is closed."""
        drain = self._drains.get(cell)
        if drain is None:
            return False
        if moved:
            drain.moved += 1
        else:
            drain.ended += 1
        return True

    def of(self, cell: str) -> Drained:
        """What became of requests on a closed route, of those that ``told`` has not been called for."""
        drain = self._drains[cell]
        return Drained(ended=drain.ended, moved=drain.moved)

    def told(self, cell: str) -> None:
        """A cell that trains is drained of nothing when it comes back: each request is told of once."""
        self._drains[cell] = _Drain(self._drains[cell].since)
