"""Which loss a run trains with. Kept apart from the loss so that reading a configuration needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

CLIPS: Final[dict[str, tuple[float, float]]] = {
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "grpo": (0.2, 0.2),
    "cispo": (1.0, 1.0),
}
"""(epsilon_low, epsilon_high) of each loss where a configuration names none. ``cispo`` has no lower bound."""


class LossConfig(BaseModel):
    """Raises a validation error for ``old = behaviour`` without a measurement that allows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss: Literal["gspo", "gspo_token", "grpo", "cispo"] = "gspo"
    """Formulas: ``trajectory.loss.LOSSES``."""

    old: Literal["proximal", "behaviour"] = "proximal"
    """What importance ratios are relative to. ``proximal``: the policy of the same forward pass, so a ratio is 1 in
    value, and the behaviour policy enters through the detached, truncated weight w. ``behaviour``: the policy that
    sampled, w = 1, the published ratios."""

    epsilon_low: float = Field(default=3e-4, gt=0, le=1)
    """Ratios are clipped below at 1 − epsilon_low. None: that of the loss in ``CLIPS``."""

    epsilon_high: float = Field(default=4e-4, gt=0)
    """Ratios are clipped above at 1 + epsilon_high. None: that of the loss in ``CLIPS``."""

    truncation: float | None = Field(default=2.0, ge=1)
    """C: w = min(exp(log-ratio to the behaviour policy), C); None for no bound. Used with ``old = proximal``."""

    mismatch_p99: float | None = Field(default=None, ge=0)
    """Measured 99th percentile of |log s_τ| between trainer and engine on unstale data. ``old = behaviour`` is
    refused unless it is below a tenth of both clips: a larger mismatch clips negative advantages away."""

    @model_validator(mode="before")
    @classmethod
    def _clips_of_the_loss(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        low, high = CLIPS.get(data.get("loss", "gspo"), CLIPS["gspo"])
        filled = {"epsilon_low": low, "epsilon_high": high}
        return {**data, **{name: value for name, value in filled.items() if data.get(name) is None}}

    @model_validator(mode="after")
    def _mismatch_allows_behaviour(self) -> Self:
        limit = min(self.epsilon_low, self.epsilon_high) / 10
        if self.old == "behaviour" and (self.mismatch_p99 is None or self.mismatch_p99 >= limit):
            measured = "not measured" if self.mismatch_p99 is None else f"{self.mismatch_p99:g}"
            raise ValueError(
                f"old = behaviour needs a p99 of |log s| on unstale data below {limit:g} (mismatch_p99: {measured}); "
                "use old = proximal"
            )
        return self
