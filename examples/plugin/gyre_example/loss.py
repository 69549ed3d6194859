"""A loss: a function from `Targets` to an `Objective`, with the clips that it is counted by."""

from __future__ import annotations

from trajectory.loss import Loss, Objective, Targets


def unclipped(t: Targets) -> Objective:
    """The sequence policy gradient without clipping.

    s_τ = exp(mean over T_τ of (log π_θ − log π_old))
    ℓ_τ = −w_τ · s_τ Â,   w_τ = min(exp(mean over T_τ of the mismatch), C)
    """
    ratio = t.means(t.current - t.old).exp()
    return Objective(False, ratio * t.advantage, ratio, t.means(t.mismatch))


UNCLIPPED = Loss(unclipped, epsilon_low=3e-4, epsilon_high=4e-4)
"""The clips change nothing here, but `gyre gauges` counts what lies outside of them."""
