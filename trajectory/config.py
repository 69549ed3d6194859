"""What a run decides about its algorithm: trajectories, the loss and the optimizer, declared and checked here alone.

The names that a configuration chooses from stand here as well; help texts and errors are made from them. Pydantic only,
so workflow code may import this: the formulas are in the modules that each field names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trajectory.plugins import Choices

ADVANTAGE_NAMES: Final = Choices(["group", "leave_one_out", "mean_only"])
REDUCTION_NAMES: Final = Choices(["episode_tokens", "episode_trajectories", "tokens"])
DRAW_NAMES: Final = Choices(["seeded", "chronological", "longest"])

CLIPS: Final[dict[str, tuple[float, float]]] = {
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "grpo": (0.2, 0.2),
    "cispo": (1.0, 1.0),
}
"""(epsilon_low, epsilon_high) of gyre's own losses where a configuration names none. ``cispo`` has no lower bound."""

LOSS_NAMES: Final = Choices(CLIPS, "gyre.losses")
"""An entry point's object is a ``trajectory.loss.Loss``, which has its clips with it."""

OrNone = BeforeValidator(lambda value: None if value == "none" else value)
"""TOML has no null: the word "none" stands for it."""


class _FrozenConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TrajectoryConfig(_FrozenConfig):
    advantage: Annotated[str, AfterValidator(ADVANTAGE_NAMES.check)] = ADVANTAGE_NAMES.built_in[0]
    """One of ``ADVANTAGE_NAMES`` (formulas: ``trajectory/advantage.py``)."""
    reduction: Annotated[str, AfterValidator(REDUCTION_NAMES.check)] = REDUCTION_NAMES.built_in[0]
    """How the losses of trajectories add up: one of ``REDUCTION_NAMES`` (formulas: ``trajectory/reduction.py``)."""
    cap: Annotated[int | None, OrNone] = Field(default=5, ge=1)
    """Trajectories per episode at most; "none" for no cap."""
    draw: Annotated[str, AfterValidator(DRAW_NAMES.check)] = DRAW_NAMES.built_in[0]
    """Which of a kind come first under the cap: one of ``DRAW_NAMES`` (``trajectory/selection.py``)."""
    summary_reserve: int = Field(default=0, ge=0)
    """Places of the cap that summaries take before everything else."""
    share_prefixes: bool = True
    """Compute what trajectories of an episode have in common once, where they meet in a micro-step."""
    token_budget: int = Field(default=16384, ge=1)
    """Tokens of a micro-step at most, a shared prefix counted once; only a single longer trajectory exceeds it."""

    @model_validator(mode="after")
    def _reserve_is_part_of_the_cap(self) -> Self:
        if self.summary_reserve and (self.cap is None or self.summary_reserve > self.cap):
            raise ValueError(f"summary_reserve: {self.summary_reserve} places are not part of a cap of {self.cap}")
        return self


class LossConfig(_FrozenConfig):
    loss: Annotated[str, AfterValidator(LOSS_NAMES.check)] = LOSS_NAMES.built_in[0]
    """One of ``LOSS_NAMES`` (formulas: ``trajectory/loss.py``)."""
    old: Literal["proximal", "behaviour"] = "proximal"
    """What importance ratios are relative to. ``proximal``: the policy of the same forward pass, so a ratio is 1 in
    value, and the behaviour policy enters through the detached, truncated weight w. ``behaviour``: the policy that
    sampled, w = 1, the published ratios."""
    epsilon_low: float | None = Field(default=None, gt=0, le=1)
    """Ratios are clipped below at 1 − epsilon_low; left out, it is the loss's own. None is left only for a loss of an
    installed package, which has its clips with it."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Ratios are clipped above at 1 + epsilon_high; the same."""
    truncation: Annotated[float | None, OrNone] = Field(default=2.0, ge=1)
    """C: w = min(exp(log-ratio to the behaviour policy), C); "none" for no bound. Used with ``old = proximal``."""
    mismatch_p99: float | None = Field(default=None, ge=0)
    """Measured 99th percentile of |log s_τ| between trainer and engine on unstale data. ``old = behaviour`` is
    refused unless it is below a tenth of both clips: a larger mismatch clips negative advantages away."""

    @model_validator(mode="before")
    @classmethod
    def _clips_of_the_loss(cls, data: Any) -> Any:
        loss = data.get("loss", LOSS_NAMES.built_in[0]) if isinstance(data, Mapping) else None
        if not isinstance(loss, str):
            return data  # refused for what it is
        low, high = CLIPS.get(loss, (None, None))
        clips = {"epsilon_low": low, "epsilon_high": high}
        return {**data, **{name: clip for name, clip in clips.items() if data.get(name) is None}}

    @model_validator(mode="after")
    def _mismatch_allows_behaviour(self) -> Self:
        if self.old == "proximal":
            return self
        if self.epsilon_low is None or self.epsilon_high is None:
            raise ValueError(f"old = behaviour with the loss {self.loss} needs epsilon_low and epsilon_high")
        limit = min(self.epsilon_low, self.epsilon_high) / 10
        if self.mismatch_p99 is None or self.mismatch_p99 >= limit:
            measured = "not measured" if self.mismatch_p99 is None else f"{self.mismatch_p99:g}"
            raise ValueError(
                f"old = behaviour needs a p99 of |log s| on unstale data below {limit:g} (mismatch_p99: {measured}); "
                "use old = proximal"
            )
        return self


class OptimizerConfig(_FrozenConfig):
    kind: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate, constant over the run."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW: decay of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW: added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled for AdamW, L2 for SGD. One-dimensional parameters (norms) are never decayed."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global L2 norm of the gradient after division by N; 0 for no clipping."""
