"""What the scheduler, the cells and a step's trainers say to each other: desired states, orders, gradient sums.

Part of the contracts (`workflows.contracts.results`): frozen, unknown keys refused, references and scalars only. An
order is one type all the way: what the step or the cell orders is what the replica's process takes
(`infra.megatron.service`), and its answer comes back as it is.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from trajectory.config import LossConfig, OptimizerConfig
from workflows.contracts.configuration import Contract, RunConfig, SchedulerConfig
from workflows.contracts.results import StepResult

Role = Literal["idle", "rollout", "train"]


class RunContext(Contract):
    """What a cell needs to know of the run that it works for."""

    run: str
    policy: str
    optimizer: OptimizerConfig
    loss: LossConfig

    @classmethod
    def of(cls, config: RunConfig) -> RunContext:
        return cls(run=config.name, policy=config.policy, optimizer=config.optimizer, loss=config.loss)


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
    drain_s: float = 0.0
    """Seconds for which calls that run on the cell may end by themselves before they are moved to another."""
    update_wait_s: float = 0.0
    """The same where the cell goes on serving, under another weight version."""
    pool: str = ""
    """Pool whose scheduler hears how long the switch took, and when the cell is lost."""
    lost_s: float = 90.0
    """Seconds after which the cell counts as lost when a part of it doesn't answer."""

    @property
    def of_run(self) -> RunContext:
        """What a cell can't serve or train without. Raises ValueError when it isn't there."""
        if self.context is None:
            raise ValueError("a cell needs the context of a run to serve or train")
        return self.context


class DrainInput(Contract):
    cell: str
    epoch: int
    deadline_s: float = 30.0
    """Seconds after ``drain_s`` in which every proxy has to say that it has no request left on the cell."""
    drain_s: float = 0.0
    """Seconds for which calls that run on the cell may end by themselves."""


class DrainResult(Contract):
    seconds: float
    """From the closing of the route until no call ran on the cell."""
    acknowledged: int
    """Proxies that said they have no request left on the cell."""
    expired: int
    """Proxies whose lease ran out instead."""
    ended: int = 0
    """Calls that ran when the route closed and ended by themselves."""
    moved: int = 0
    """Calls that were aborted; what they had sampled goes on elsewhere, or here under the next weights."""


class CellFacts(BaseModel):
    """What a cell's workflow knows of it and tells whoever asks."""

    cell: str
    engine: str = ""
    """Incarnation of the rollout engine."""
    replica: str = ""
    """Incarnation of the training replica."""
    version: int = -1
    error: str = ""
    failures: int = 0
    """Attempts in a row that failed to reach the desired state."""
    holds: bool = True
    """It is in the desired state, as far as is known."""
    lost: str = ""
    """Why the cell is lost; empty while it isn't."""
    last_switch_s: float = 0.0
    last_drain: DrainResult | None = None
    """None: never drained."""
    draining_s: float | None = None
    """The cell waits at most so many seconds for its calls to end; None: it doesn't drain now, or waits for nothing."""
    wanted_at: str = ""
    """Since when its state is desired; like the following, ISO 8601, and empty when that is not known."""
    reached_at: str = ""
    """When a desired state was last reached."""
    again_at: str = ""
    """When the next attempt begins, after one that failed."""


class CellStatus(CellFacts, Contract):
    role: Role
    """The desired one, like ``step``, ``epoch`` and ``reason``."""
    step: int
    epoch: int
    reason: str = ""
    """Why the scheduler desires that state."""
    actual: str = ""
    """The role that it is in."""


class TrainerReady(Contract):
    """Cell -> Step: the replica holds the step's version and can be given micro-steps."""

    cell: str
    incarnation: str
    epoch: int
    core: bool
    running: int
    """Episodes of the run that ran when the cell had left rollout."""


class LeaseRequest(Contract):
    """Run -> Scheduler: give me the pool's cells, serving this version."""

    run: str
    version: int
    candidate_ref: str
    context: RunContext
    scheduler: SchedulerConfig


class StepOpened(LeaseRequest):
    """Step -> Scheduler: the same of one step."""

    step: int
    train: bool
    episodes: int


class Switched(Contract):
    """Cell -> Scheduler: a role switch, from the order to the state that holds."""

    cell: str
    to: Role
    seconds: float


class Decided(Contract):
    """A decision of the policy, kept for people."""

    at: str
    """ISO 8601."""
    reason: str
    roles: dict[str, str]
    """Of each cell, in words."""


class CellLost(Contract):
    """Cell -> Scheduler: a part of the cell has not answered for too long."""

    cell: str
    reason: str


class TrainerGone(Contract):
    """Scheduler -> Step: a cell is lost, or has been given something else to do; its gradient sum with it."""

    cell: str
    epoch: int
    """The cell's trainers of an older epoch count no more."""
    reason: str


class StepProgress(Contract):
    """Step -> Scheduler, when the training work that waits has changed."""

    run: str
    step: int
    ready: int
    """Micro-steps that wait or are being trained."""
    ready_tokens: int
    tokens_per_s: float
    """Training throughput of one cell, measured in this step; 0 while unknown."""
    rollout_tokens_per_s: float = 0.0
    """Training tokens that an active second of an episode has brought in this step; 0 while unknown."""


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


class ReplicaOrder(Contract):
    """To one incarnation of a replica about the gradient sum of one step; any other incarnation refuses it."""

    cell: str
    incarnation: str
    run: str
    step: int


class TrainInput(ReplicaOrder):
    version: int
    micro_steps: list[str]


class TrainResult(Contract):
    seconds: float
    stats: dict[str, float]
    stats_ref: str = ""
    """Blob with the full loss statistics of every micro-step of the claim, by its reference."""


class GradientsInput(ReplicaOrder):
    pass


class GradientSum(Contract):
    """A satellite's offer: its gradient sum over ``micro_steps`` lies behind ``manifest_ref``."""

    cell: str
    incarnation: str
    micro_steps: list[str]
    manifest_ref: str


class FinishInput(ReplicaOrder):
    version: int
    normaliser: int
    """N: valid episodes of the step, or with the reduction `tokens` their target tokens; groups without gradient
    included."""
    micro_steps: list[str]
    """All micro-steps of the step."""
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


class CellOrder(Contract):
    """An order to a cell's worker: bring engine or replica into ``desired``."""

    cell: str
    desired: Desired


class ServeOrder(CellOrder):
    engine_url: str
    """Engine of the cell that takes the weights."""


class CellReport(Contract):
    engine: str
    replica: str
    checksum: str = ""
    """Of the weights that the engine serves, or that the replica holds."""
    source: str = ""
    """How the weights came into the replica: `resident`, `transfer` or `blob`."""
    seconds: float = 0.0
    running: int = 0
    """Episodes of the run that ran when the cell had left rollout."""
    missing: str = ""
    """Parts of the cell that don't answer; empty when all do that its role needs."""


class WatchCellInput(Contract):
    cell: str
    engine: str
    replica: str
    needs_engine: bool = True
    """False while the cell trains: a dead engine is then no loss."""


class ReachCellInput(Contract):
    cell: str
    needs_engine: bool
