"""What a scheduling policy looks at, and what it answers: counts, measurements and forecasts of a pool's work.

Plain data. Everything that a policy can do without has a default that says "not known".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from workflows.contracts.configuration import Contract, SchedulerConfig

TOKENS_PER_S: Final = 5000.0
"""Training throughput that is assumed until a step has been measured."""


class CellView(Contract):
    cell: str
    training_step: int = -1
    """Step that the cell has been given to train, -1 while it serves."""
    core: bool = False


class Outlook(Contract):
    """What is expected of a step's unfinished episodes, from their siblings and their tasks' history.

    Seconds are counted from now, as if the episodes went on as fast as they do at this moment.
    """

    tail_s: float
    """Until the last of them ends."""
    rollout_s: float = 0.0
    """What they need of cells, all together: seconds of one full cell."""
    due: list[tuple[float, int]] = []
    """(seconds until groups are finished, training tokens that they bring), soonest first."""
    latest_s: list[float] = []
    """Of each that is due: seconds after which its budget ends it however slow it is; empty when there is no budget."""


class StepView(Contract):
    step: int
    train: bool
    unfinished: int
    """Queued and running episodes: the watermark."""
    total: int
    ready: int
    """Micro-steps that wait or are being trained."""
    ready_tokens: int = 0
    outlook: Outlook | None = None
    """None: nothing is known about how long its episodes take."""


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
    rollout_tokens_per_s: float = 0.0
    """Measured training tokens that an active second of an episode brings; 0: not measured."""
    switch_out_s: float | None = None
    """Measured seconds in which a cell leaves rollout and is ready to train; None: not measured."""
    switch_in_s: float | None = None
    """Measured seconds in which it comes back."""
    solo_speedup: float = 1.0
    """How much faster an episode is alone on a cell than on a full one."""


class Assignment(Contract):
    step: int = -1
    """Step to train; -1 to serve rollout."""
    core: bool = False


SERVES: Final = Assignment()


class Decision(Contract):
    assignments: dict[str, Assignment]
    reason: str


Policy = Callable[[PoolView], Decision]


def assign(view: PoolView, step: StepView | None, trainers: int, reason: str) -> Decision:
    """Give ``trainers`` cells to ``step``: those that train it already first, then the preferred ones."""
    assignments = dict.fromkeys([cell.cell for cell in view.cells], SERVES)
    if step is not None and trainers > 0:
        ranked = sorted(view.cells, key=lambda cell: (cell.training_step != step.step, not cell.core))
        for position, cell in enumerate(ranked[:trainers]):
            assignments[cell.cell] = Assignment(step=step.step, core=position == 0)
    return Decision(assignments=assignments, reason=reason)


def oldest_training(view: PoolView) -> StepView | None:
    return next((step for step in view.steps if step.train), None)


class ServingNeed(NamedTuple):
    """What a step's unfinished episodes, and those of evaluations, need of a pool's cells."""

    evaluated: int
    """Unfinished episodes of evaluations."""
    spare: int
    """Cells that the others can do without: they hold what is unfinished."""
    text: str
    """For people: with what waits to be trained."""


def serving_need(view: PoolView, step: StepView) -> ServingNeed:
    evaluated = sum(other.unfinished for other in view.steps if not other.train)
    needed = math.ceil((step.unfinished + evaluated) / view.capacity)
    text = (
        f"step {step.step}: {step.unfinished} of {step.total} episodes unfinished need {needed} of {len(view.cells)} "
        f"cells at {view.capacity} each; {step.ready} micro-steps ready"
    )
    return ServingNeed(evaluated, max(0, len(view.cells) - needed), text)


def already_training(view: PoolView, step: StepView) -> int:
    """Cells that train the step and stay with it: all, unless the cells that served are lost and episodes wait."""
    training = sum(cell.training_step == step.step for cell in view.cells)
    return min(training, max(0, len(view.cells) - 1)) if step.unfinished else training
