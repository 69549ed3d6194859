"""Which loss a run trains with. Kept apart from the loss so that reading a configuration needs no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LossConfig(BaseModel):
    """Raises a validation error for ``old = behaviour`` without a measurement that allows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss: Literal["gspo"] = "gspo"
    """Group sequence policy optimisation (arXiv:2507.18071), per trajectory."""

    old: Literal["proximal", "behaviour"] = "proximal"
    """What the importance ratio s_τ is relative to. ``proximal``: the policy of the same forward pass, so s_τ = 1 in
    value, and the behaviour policy enters through the detached, truncated weight w_τ. ``behaviour``: the policy
    that sampled, w_τ = 1, the plain GSPO ratio."""

    epsilon_low: float = Field(default=3e-4, gt=0, lt=1)
    """s_τ is clipped below at 1 − epsilon_low."""

    epsilon_high: float = Field(default=4e-4, gt=0)
    """s_τ is clipped above at 1 + epsilon_high."""

    truncation: float = Field(default=2.0, ge=1)
    """C: w_τ = min(exp(mean log-ratio to the behaviour policy), C). Used with ``old = proximal``."""

    mismatch_p99: float | None = Field(default=None, ge=0)
    """Measured 99th percentile of |log s_τ| between trainer and engine on unstale data. ``old = behaviour`` is
    refused unless it is below a tenth of both clips: a larger mismatch clips negative advantages away."""

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
