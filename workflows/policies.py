"""Scheduling policies: which cells serve rollout and which train, as pure functions of what waits.

A policy sees counts, never a clock or a server, and always gives every cell a role. The same functions run in
`watch_demand` (against the counts in Redis) and in tests.

Invariants of every policy: no unfinished episode is left without a serving cell; a cell that trains a step stays
with it until the step is closed (its gradient sum is there); a step without unfinished episodes always has a core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from workflows.configuration import Contract, SchedulerConfig

TOKENS_PER_S: Final = 5000.0
"""Training throughput that is assumed until a step has been measured."""


class CellView(Contract):
    cell: str
    training_step: int = -1
    """Step that the cell has been given to train, -1 while it serves."""
    core: bool = False


class StepView(Contract):
    step: int
    train: bool
    unfinished: int
    """Queued and running episodes: the watermark."""
    total: int
    ready: int
    """Micro-steps that wait or are being trained."""
    ready_tokens: int = 0


class PoolView(Contract):
    run: str
    cells: list[CellView]
    """In the order of preference for training."""
    steps: list[StepView]
    """Open steps, oldest first."""
    capacity: int
    """Episodes that one serving cell holds at once."""
    scheduler: SchedulerConfig
    tokens_per_s: float = TOKENS_PER_S


class Assignment(Contract):
    step: int = -1
    """Step to train; -1 to serve rollout."""
    core: bool = False


class Decision(Contract):
    assignments: dict[str, Assignment]
    reason: str


Policy = Callable[[PoolView], Decision]


def _decision(view: PoolView, step: StepView | None, trainers: int, reason: str) -> Decision:
    """Give ``trainers`` cells to ``step``: those that train it already first, then the preferred ones."""
    assignments = {cell.cell: Assignment() for cell in view.cells}
    if step is not None and trainers > 0:
        ranked = sorted(view.cells, key=lambda cell: (cell.training_step != step.step, not cell.core))
        for position, cell in enumerate(ranked[:trainers]):
            assignments[cell.cell] = Assignment(step=step.step, core=position == 0)
    return Decision(assignments=assignments, reason=reason)


def _oldest_training(view: PoolView) -> StepView | None:
    return next((step for step in view.steps if step.train), None)


def _already(view: PoolView, step: StepView) -> int:
    return sum(cell.training_step == step.step for cell in view.cells)


def watermark(view: PoolView) -> Decision:
    """The paper's rule: a cell leaves rollout once the others can hold what is unfinished of the oldest step.

    The core goes first, as soon as it fits. A further cell follows only when the training work that waits is worth
    a role switch (``satellite_s``). Episodes of later steps are filler: they never keep a cell in rollout, but while
    there is filler and nothing to train, no cell leaves.
    """
    step = _oldest_training(view)
    if step is None:
        return _decision(view, None, 0, "no training step is open: all cells serve")
    serving_evaluation = sum(other.unfinished for other in view.steps if not other.train)
    needed = math.ceil((step.unfinished + serving_evaluation) / view.capacity)
    spare = max(0, len(view.cells) - needed)
    already = _already(view, step)
    filler = any(other.unfinished for other in view.steps if other.step > step.step)
    if step.unfinished == 0 and not serving_evaluation:
        spare = max(spare, 1)
    wanted = 0
    if step.unfinished == 0 or step.ready or (step.unfinished < step.total and not filler):
        seconds = step.ready_tokens / view.tokens_per_s
        worth = seconds / view.scheduler.satellite_s if view.scheduler.satellite_s else math.inf
        wanted = 1 + int(min(worth, max(0, step.ready - 1)))
    trainers = max(min(spare, wanted), already)
    reason = (
        f"step {step.step}: {step.unfinished} of {step.total} episodes unfinished need {needed} of "
        f"{len(view.cells)} cells at {view.capacity} each; {step.ready} micro-steps ready; {trainers} train"
    )
    return _decision(view, step, trainers, reason)


def colocate(view: PoolView) -> Decision:
    """Baseline: all cells serve until the step has no unfinished episode, then all train."""
    step = _oldest_training(view)
    if step is None or step.unfinished or any(other.unfinished for other in view.steps if not other.train):
        return _decision(view, None, 0, "colocate: episodes are unfinished, all cells serve")
    return _decision(view, step, len(view.cells), f"colocate: all cells train step {step.step}")


def async_split(view: PoolView) -> Decision:
    """Baseline: a static split; ``training_cells`` cells only ever train, the others only ever serve.

    One cell cannot be split: it is colocated.
    """
    if len(view.cells) == 1:
        return colocate(view)
    step = _oldest_training(view)
    trainers = min(view.scheduler.training_cells, len(view.cells) - 1)
    if step is None:
        # The split stays as it is between steps: a cell that is for training is given no other work.
        assignments = {cell.cell: Assignment(step=cell.training_step, core=cell.core) for cell in view.cells}
        return Decision(assignments=assignments, reason="async: static split, no training step is open")
    return _decision(view, step, trainers, f"async: static split, {trainers} cells train step {step.step}")


POLICIES: Final[dict[str, Policy]] = {"watermark": watermark, "colocate": colocate, "async": async_split}


def decide(view: PoolView) -> Decision:
    """The decision of the policy that ``view.scheduler`` names."""
    return POLICIES[view.scheduler.policy](view)
