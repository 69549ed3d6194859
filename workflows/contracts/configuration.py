"""What a person decides about a training job: the run configuration, read from TOML by `gyre submit run`.

Every model is frozen and refuses unknown keys.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trajectory.config import LossConfig, OptimizerConfig, TrajectoryConfig
from trajectory.plugins import Choices

POLICY_NAMES: Final = Choices(["predictive", "watermark", "colocate", "async"], "gyre.scheduling_policies")
"""An entry point's object is a function as in `workflows/scheduling/policies.py`."""


class Contract(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def shared(model: BaseModel, part: type[BaseModel]) -> dict[str, Any]:
    """The fields of ``model`` that ``part`` declares, by name: for another model that has them too."""
    return {name: getattr(model, name) for name in part.model_fields}


class TaskSets(Contract):
    train: str
    """Folder of tasks in Harbor's format, one sub-folder each."""
    heldout: str = ""
    """Folder of tasks for evaluation; empty for none."""


class SamplingConfig(Contract):
    temperature: float = Field(default=1.0, gt=0)
    max_new_tokens: int = Field(default=1024, ge=1)
    """Sampled tokens per turn at most."""
    context_limit: int = Field(default=32768, ge=16)
    """Prompt and output tokens of a call at most."""
    max_calls: int = Field(default=500, ge=1)
    """Model calls of an episode at most; beyond, it is truncated."""


class BudgetConfig(Contract):
    active_s: float = Field(default=3600, gt=0)
    """Seconds an episode may run, without the time for which the proxy held its calls."""
    wall_s: float = Field(default=6 * 3600, gt=0)
    """Seconds an episode may take by the clock on the wall, held time included."""


class EvaluationConfig(Contract):
    every: int = Field(default=10, ge=0)
    """Evaluate before the first update and after every this many; 0 for never."""
    tasks: int = Field(default=200, ge=1)
    """The first this many held-out tasks, the same ones each time."""


class SchedulerConfig(Contract):
    policy: Annotated[str, AfterValidator(POLICY_NAMES.check)] = POLICY_NAMES.built_in[0]
    """One of `POLICY_NAMES` (rules: `workflows/scheduling/policies.py`)."""
    training_cells: int = Field(default=1, ge=1)
    """Cells that the static split of `async` gives to training."""
    claim_s: float = Field(default=30.0, gt=0)
    """Seconds of training work that one claim of a cell holds: less is lost with a replica than the claim costs."""
    satellite_s: float = Field(default=5.0, ge=0)
    """Seconds of training work that must wait before a further cell joins (about twice a role switch); `predictive`
    takes the measured seconds of the last switches once there are any."""
    solo_speedup: float = Field(default=1.0, ge=1)
    """How much faster an episode goes on alone on a cell than on a full one, for `predictive`: 1 where the time goes
    into tools."""
    drain_s: float = Field(default=2.0, ge=0, le=600)
    """Seconds for which the calls on a cell that leaves rollout may end by themselves; what runs on is then aborted and
    goes on elsewhere. The switch takes as much longer; 0 moves every call at once."""
    calls_across_updates: Literal["continue", "finish"] = "continue"
    """What becomes of a call that runs on a cell when its weights are updated: `continue` aborts it, and the rest of
    the turn is sampled under the new weights after a fresh prefill; with `finish` the update waits for it."""
    update_wait_s: float = Field(default=600.0, gt=0, le=3600)
    """Seconds that an update waits at most for the calls that must `finish`; what is left then continues."""
    lost_s: float = Field(default=90.0, gt=0)
    """Seconds after which a cell whose worker, engine or replica doesn't answer counts as lost, until it answers again:
    longer than it takes to start a process of a cell anew."""

    @property
    def waits(self) -> dict[str, float]:
        """The seconds that a cell is told (`Desired`)."""
        finish = self.calls_across_updates == "finish"
        return {
            "drain_s": self.drain_s,
            "update_wait_s": self.update_wait_s if finish else 0.0,
            "lost_s": self.lost_s,
        }


class EpisodeConfig(Contract):
    """How episodes are run."""

    harness: str = "mini"
    """Name of the harness that runs every episode (`gyre harness list` names them)."""
    restarts: int = Field(default=1, ge=0)
    """How often an episode whose supervisor died is started again before it counts as `infra_failed`."""
    restart: Literal["resume", "fresh"] = "resume"
    """How: `resume` goes on in the same workspace by the harness's own resume, where it has one and the files are still
    on that machine, and otherwise from zero; `fresh` always starts from zero."""
    sampling: SamplingConfig = SamplingConfig()
    budget: BudgetConfig = BudgetConfig()


class RunConfig(EpisodeConfig):
    """A training job. Read from TOML by `gyre submit run`."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    policy: str
    """Hugging Face folder (config.json, model.safetensors, tokenizer.json) that the run starts from."""
    tasks: TaskSets
    steps: int = Field(ge=0)
    """Updates after which the run ends (0: it only takes steps from `gyre submit step`)."""
    tasks_per_step: int = Field(ge=1, le=512)
    task_order: Literal["shuffled", "given"] = "shuffled"
    """Each pass over the training tasks in a seeded order of its own, or in the order of the set."""
    group_size: int = Field(default=16, ge=1, le=256)
    max_staleness: int = Field(default=0, ge=0, le=4)
    seed: int = 0
    record_gradients: bool = True
    """Keep each step's summed gradient, so that `gyre replay` can compare; as large as the weights."""
    optimizer: OptimizerConfig = OptimizerConfig()
    trajectory: TrajectoryConfig = TrajectoryConfig()
    loss: LossConfig = LossConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
