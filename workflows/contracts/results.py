"""What workflows, activities and the command line say to each other.

Inputs and results are references and a few scalars (below 2 KB each); bulk data is in the blob store. Every model
is frozen, refuses unknown keys, and is the only thing that crosses a process boundary through Temporal.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from pydantic import Field

from trajectory.config import TrajectoryConfig
from workflows.contracts.configuration import Contract, EpisodeConfig, RunConfig, shared


class Outcome(StrEnum):
    """How an episode ended: a closed set (DESIGN, trajectory mathematics)."""

    COMPLETED = "completed"
    TIMED_OUT = "timed_out"
    """Budget spent; graded on the preserved workspace."""
    TRUNCATED = "truncated"
    """Context, turn or token limit reached; graded."""
    HARNESS_FAILED = "harness_failed"
    """Graded if it made policy calls and the workspace survives, else excluded."""
    EVALUATOR_FAILED = "evaluator_failed"
    """Excluded, never zero; can be graded again from the stored workspace."""
    INFRA_FAILED = "infra_failed"
    CANCELLED = "cancelled"


# --- steps and groups ------------------------------------------------------------------------------------------


class RunFacts(Contract):
    """What the validation of a run configuration found."""

    train_tasks: int
    heldout_tasks: int
    candidate_ref: str
    """Candidate of version 0, made from the policy folder."""


class StepInput(Contract):
    config: RunConfig
    pool: str
    step: int
    """Number of the step in its run; evaluations are steps too."""
    version: int
    """Weight version that the step trains (or evaluates)."""
    train: bool
    candidate_ref: str = ""
    """Candidate of ``version``; empty while an earlier step still trains it (``max_staleness`` > 0)."""
    tasks: list[int]
    """Indices into the sorted task set, one group each."""
    group_size: int
    tokens_per_s: float = 1000.0
    """Training throughput of one cell in the step before: what a first claim is measured by."""

    @property
    def run(self) -> str:
        return self.config.name

    @property
    def oldest_version(self) -> int:
        return max(0, self.version - (self.config.max_staleness if self.train else 0))


class GroupInput(Contract):
    config: RunConfig
    step: int
    version: int
    oldest_version: int
    train: bool
    group: int
    task: int
    group_size: int


class EpisodeInput(EpisodeConfig):
    run: str
    step: int
    group: int
    index: int
    task_set: str
    task: int
    min_version: int
    max_version: int


class EpisodeExit(Contract):
    """How the harness of an episode ended, before grading."""

    outcome: Outcome
    calls: int
    """Policy calls that were delivered."""
    gradeable: bool
    active_s: float
    held_s: float
    wall_s: float
    records: str = ""
    """Name under which the episode's call records lie: of the generation that ended it."""
    workspace_ref: str = ""
    """Blob with the preserved workspace (tar)."""
    generation: int = 0
    """The generation that ended it, from 1; 0 when that is not known."""
    restarts: list[str] = []
    """One line for each generation that was lost before: when, why, and what followed."""
    detail: str = ""
    """One line for people: why it ended."""


class GradeInput(Contract):
    episode: str
    task_set: str
    task: int
    workspace_ref: str


class Verdict(Contract):
    reward: float = Field(ge=0, le=1)
    seconds: float
    evaluator: str = ""
    """The task's name, and the digest of the tests and settings that decided: `NAME@sha256:HEX`."""


class EpisodeResult(Contract):
    episode: str
    outcome: Outcome
    reward: float | None
    """None: excluded."""
    exit: EpisodeExit
    detail: str = ""
    evaluator: str = ""
    """As in `Verdict`; empty when none had begun."""


class ProcessInput(Contract):
    run: str
    step: int
    group: int
    task: str
    train: bool
    version: int
    episodes: list[EpisodeResult]
    trajectory: TrajectoryConfig


class MicroStepRef(Contract):
    ref: str
    tokens: int
    targets: int


class Figures(Contract):
    """Sums over episodes and their calls: they add up (`+`), of groups to a step, and `Figures()` is zero."""

    valid: int = 0
    """Episodes with a reward."""
    passed: int = 0
    """Episodes with reward 1."""
    outcomes: dict[str, int] = {}
    sampled_tokens: int = 0
    trained_tokens: int = 0
    held_s: float = 0.0
    moved_calls: int = 0
    """Calls that more than one cell served."""
    moved_tokens: int = 0
    """As in `trajectory.records`, like the three that follow."""
    moved_from_store: int = 0
    moved_recomputed: int = 0
    moved_bytes: int = 0

    def __add__(self, other: Figures) -> Figures:
        sums = {
            name: dict(Counter(mine) + Counter(getattr(other, name)))
            if isinstance(mine, dict)
            else mine + getattr(other, name)
            for name, mine in shared(self, Figures).items()
        }
        return Figures(**sums)


class GroupResult(Figures):
    group: int
    task: str
    reward_sum: float
    reason: str = ""
    """Why the group gives no gradient; empty when it does."""
    micro_steps: list[MicroStepRef] = []
    normaliser: int | None = None
    """The group's part of N, by the run's reduction; None for its valid episodes."""
    recomputed_tokens: int = 0
    """Of the micro-steps' tokens, those computed again because trajectories that share them had to be split."""
    oldest_version: int = -1
    active_s: float = 0.0
    stats_ref: str = ""
    """Blob with the group's full statistics and its episodes' seals."""

    @property
    def in_normaliser(self) -> int:
        return self.valid if self.normaliser is None else self.normaliser


class StepResult(Figures):
    run: str
    step: int
    version: int
    """Weight version after the step."""
    train: bool
    candidate_ref: str
    episodes: int
    mean_reward: float
    groups_without_gradient: dict[str, int] = {}
    micro_steps: int = 0
    staleness: int = 0
    grad_norm: float = 0.0
    episodes_running_at_first_switch: int = 0
    """Episodes of the run that ran when the first cell had left rollout for this step: elasticity at work."""
    core: str = ""
    satellites: list[str] = []
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    """Training throughput of one cell; 0 when too little was trained to tell."""
    train_stats: dict[str, float] = {}
    """Sums and maxima of the loss's statistics over the claims that ended."""
    gauges: dict[str, float] = {}
    """The step's gauges in few numbers (`trajectory.gauges.MEANING`)."""
    gauges_ref: str = ""
    """Blob with all of them (`trajectory.gauges.Gauges`)."""

    @property
    def pass_rate(self) -> float:
        return self.passed / self.valid if self.valid else 0.0


# --- what people send ---------------------------------------------------------------------------------------------


class SubmitStep(Contract):
    request_id: str
    train: bool = False
    tasks: int = Field(default=200, ge=1)
    """How many tasks: held-out ones for an evaluation, training ones otherwise."""


class PauseRequest(Contract):
    request_id: str
    hold: bool = False
    """Also hold the calls of running episodes, within the harness's patience; otherwise those run to their end."""


class ResizeRequest(Contract):
    request_id: str
    cells: list[str]


class RunStatus(Contract):
    run: str
    phase: str
    paused: bool
    trained_version: int
    steps_opened: int
    open_steps: list[int]
    results: list[StepResult] = []
    waiting_for: str = ""
