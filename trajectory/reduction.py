"""How the losses of an episode's trajectories add up, and what the step's sum is divided by.

Invariant: a factor depends on its own episode alone, and N is a sum over groups; so trajectories can be trained in any
cut and order before the step's other groups have finished. L = 1/N · Σ_e Σ_τ weight_τ ℓ_τ, with T_τ the targets of τ,
E = Σ_τ |T_τ| over the K selected trajectories of episode e, and V the valid episodes of the step. Episodes of groups
without gradient count in N like all others.

To add a reduction: a function from the |T_τ| of an episode to the weights of its trajectories with its formula in its
docstring, in ``REDUCTIONS`` here, and its name in ``trajectory.config``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple


class Reduction(NamedTuple):
    weights: Callable[[Sequence[int]], list[float]]
    """weight_τ of each trajectory of an episode, from their |T_τ| > 0."""
    normaliser: Callable[[Sequence[int]], int]
    """A group's part of N, from the E of each of its valid episodes."""


def episode_tokens(targets: Sequence[int]) -> list[float]:
    """L = 1/|V| · Σ_e Σ_τ (|T_τ| / E) ℓ_τ: each episode weighs 1, and extra branches add no weight."""
    total = sum(targets)
    return [count / total for count in targets]


def episode_trajectories(targets: Sequence[int]) -> list[float]:
    """L = 1/|V| · Σ_e Σ_τ ℓ_τ / K: each episode weighs 1, and its trajectories weigh the same."""
    return [1.0 / len(targets) for _ in targets]


def tokens(targets: Sequence[int]) -> list[float]:
    """L = 1/(Σ_e E) · Σ_e Σ_τ |T_τ| ℓ_τ: the mean over all target tokens of the step, so long episodes weigh more."""
    return [float(count) for count in targets]


REDUCTIONS: Final[dict[str, Reduction]] = {
    weights.__name__: Reduction(weights, normaliser)
    for weights, normaliser in ((episode_tokens, len), (episode_trajectories, len), (tokens, sum))
}
