"""The cells of a simulation: what each was told, what it is, whether it is there, and what it did when.

A cell that comes (back) is cold: it holds nothing until it has taken on a role. It knows neither policies nor steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from workflows.scheduling.pool_view import SERVES, Assignment
from workflows.simulation.run import Segment, Simulated


@dataclass
class SimulatedCell:
    index: int
    assigned: Assignment = SERVES
    """What the scheduler told it last."""
    version: int = 0
    """Weight version it was told last."""
    holds: Assignment = SERVES
    """What it is."""
    moving: bool = False
    epoch: int = 0
    away: bool = False
    leaving: bool = False
    """Asked to go while it trained: it goes when its step is closed."""
    cold: bool = False
    life: int = 0
    """How often it has come back."""

    @property
    def name(self) -> str:
        return f"cell-{self.index:02d}"

    @property
    def serves(self) -> bool:
        return not (self.moving or self.away or self.cold) and self.holds.step < 0

    def incarnation(self, step: int) -> str:
        """Of its replica while it trains the step: another one after each loss and each change of role."""
        return f"{self.name}/{self.life}#{step}"

    def leave(self) -> None:
        self.away, self.leaving, self.moving = True, False, False
        self.assigned = self.holds = SERVES

    def come(self) -> None:
        self.away, self.leaving, self.cold = False, False, True
        self.life += 1
        self.version = -1


class Record:
    """What every cell does, into the run's segments (with ``timeline``) and its seconds of absence."""

    def __init__(self, result: Simulated, *, timeline: bool) -> None:
        self.result, self.timeline = result, timeline
        self.since = [(0.0, "serve", -1)] * result.cells

    def mark(self, now: float, index: int, what: str, step: int = -1) -> None:
        start, before, of = self.since[index]
        if (what, step) == (before, of):
            return
        if before == "away":
            self.result.away_s += now - start
        if self.timeline and now > start:
            self.result.segments.append(Segment(index, start, now, before, of))
        self.since[index] = (now, what, step)
