"""What became of a simulated run: when steps were closed, what cells did, what it cost. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Segment:
    """What a cell did from ``start`` to ``end`` (seconds): `serve`, `train`, `wait` (for training work), `switch`,
    `away`."""

    cell: int
    start: float
    end: float
    what: str
    step: int


@dataclass
class Simulated:
    """What became of a run."""

    policy: str
    closed_s: list[float] = field(default_factory=list)
    """When each step was closed."""
    opened_at: list[tuple[int, int]] = field(default_factory=list)
    """(step, trained version) at each opening."""
    episodes_of: dict[int, int] = field(default_factory=dict)
    """Episodes that had ended when a step was closed; its keys are the steps in that order."""
    switches: int = 0
    """Changes between rollout and training, both ways."""
    switches_of_step: dict[int, int] = field(default_factory=dict)
    train_s: float = 0.0
    """Cell-seconds of training."""
    serve_s: float = 0.0
    """Cell-seconds of serving, each counted by how much of a full cell's work it did."""
    cells: int = 1
    away_s: float = 0.0
    """Cell-seconds in which cells were not there."""
    redone_tokens: int = 0
    """Trained, and again because the replica that had summed them was lost."""
    reasons: list[tuple[float, str]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        return self.closed_s[-1] if self.closed_s else 0.0

    @property
    def step_s(self) -> list[float]:
        """Seconds from one step's close to the next one's."""
        return [end - start for start, end in zip([0.0, *self.closed_s], self.closed_s, strict=False)]

    @property
    def utilisation(self) -> float:
        available = self.cells * self.total_s - self.away_s
        return (self.train_s + self.serve_s) / available if available else 0.0

    @property
    def idle_cell_s(self) -> float:
        return self.cells * self.total_s - self.away_s - self.train_s - self.serve_s
