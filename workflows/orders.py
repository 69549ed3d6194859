"""What the scheduler, the cells and a step's trainers say to each other: desired states, orders, gradient sums.

Part of the contracts (`workflows.contracts`): frozen, unknown keys refused, references and scalars only.
"""

from __future__ import annotations

from typing import Literal

from workflows.configuration import Contract, LossConfig, OptimizerConfig, SchedulerConfig
from workflows.contracts import StepResult

Role = Literal["idle", "rollout", "train"]


class RunContext(Contract):
    """What a cell needs to know of the run that it works for."""

    run: str
    policy: str
    optimizer: OptimizerConfig
    loss: LossConfig


class Desired(Contract):
    """The state that the scheduler wants a cell in. A larger epoch replaces a smaller one."""

    epoch: int
    role: Role
    step: int = -1
    """Step to train (role `train`)."""
    version: int = 0
    candidate_ref: str = ""
    core: bool = False
    context: RunContext | None = None
    reason: str = ""
    fence: str = ""
    """Replica incarnation that was declared lost: if it lives, it must forget its gradient sums."""


class CellStatus(Contract):
    cell: str
    role: Role
    step: int
    version: int
    epoch: int
    engine: str
    """Incarnation of the rollout engine."""
    replica: str
    """Incarnation of the training replica."""
    error: str = ""
    last_switch_s: float = 0.0


class TrainerReady(Contract):
    """Cell -> Step: the replica holds the step's version and can be given micro-steps."""

    cell: str
    incarnation: str
    epoch: int
    core: bool
    running: int
    """Episodes of the run that ran when the cell had left rollout."""


class StepOpened(Contract):
    """Step -> Scheduler."""

    run: str
    step: int
    version: int
    train: bool
    episodes: int
    candidate_ref: str
    context: RunContext
    scheduler: SchedulerConfig


class LeaseRequest(Contract):
    """Run -> Scheduler: give me the pool's cells, serving this version."""

    run: str
    version: int
    candidate_ref: str
    context: RunContext
    scheduler: SchedulerConfig


class StepProgress(Contract):
    """Step -> Scheduler, when the training work that waits has changed."""

    run: str
    step: int
    ready: int
    """Micro-steps that wait or are being trained."""
    ready_tokens: int
    tokens_per_s: float
    """Training throughput of one cell, measured in this step; 0 while unknown."""


class StepClosed(Contract):
    """Step -> Scheduler: the step is over; ``version`` with ``candidate_ref`` is what to serve from now on."""

    run: str
    step: int
    version: int
    candidate_ref: str


class StepFinished(Contract):
    """Step -> Run."""

    step: int
    result: StepResult | None
    error: str = ""


class TrainInput(Contract):
    cell: str
    incarnation: str
    run: str
    step: int
    version: int
    micro_steps: list[str]


class TrainResult(Contract):
    seconds: float
    stats: dict[str, float]
    stats_ref: str = ""
    """Blob with the full loss statistics of every micro-step of the claim, by its reference."""


class GradientsInput(Contract):
    cell: str
    incarnation: str
    run: str
    step: int


class GradientSum(Contract):
    """A satellite's offer: its gradient sum over ``micro_steps`` lies behind ``manifest_ref``."""

    cell: str
    incarnation: str
    micro_steps: list[str]
    manifest_ref: str


class FinishInput(Contract):
    cell: str
    incarnation: str
    run: str
    step: int
    version: int
    normaliser: int
    """N: valid episodes of the step, or with the reduction `tokens` their target tokens; groups without gradient
    included."""
    micro_steps: list[str]
    satellites: list[GradientSum]
    record_gradient: bool


class Candidate(Contract):
    ref: str
    version: int
    grad_norm: float
    checksum: str


class GaugesInput(Contract):
    """Where the statistics of a step lie."""

    version: int
    """The version that was trained or evaluated."""
    groups: list[str]
    """Of each group (`GroupResult.stats_ref`)."""
    claims: list[str]
    """Of each claim that was trained (`TrainResult.stats_ref`), in the order in which they ended: of a micro-step that
    was trained again, the last one counts."""


class CommitInput(Contract):
    run: str
    step: int
    version: int
    candidate_ref: str
    result: StepResult
    gauges: GaugesInput | None = None


class Committed(Contract):
    gauges: dict[str, float] = {}
    """As in `StepResult`."""
    gauges_ref: str = ""


class DrainInput(Contract):
    cell: str
    epoch: int
    deadline_s: float = 30.0


class DrainResult(Contract):
    seconds: float
    acknowledged: int
    """Proxies that said they have no request left on the cell."""
    expired: int
    """Proxies whose lease ran out instead."""


class CellOrder(Contract):
    """An order to a cell's worker: bring engine or replica into ``desired``."""

    cell: str
    desired: Desired


class CellReport(Contract):
    engine: str
    replica: str
    checksum: str = ""
    source: str = ""
    """How the weights came: `resident`, `transfer` or `blob`."""
    seconds: float = 0.0
    running: int = 0
    """Episodes of the run that ran when the cell had left rollout."""


class WatchCellInput(Contract):
    cell: str
    engine: str
    replica: str
