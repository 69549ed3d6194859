"""How the losses of an episode's trajectories add up, and what the step's sum is divided by.

Invariant: a factor depends on its own episode alone, and N is a sum over groups; so trajectories can be trained in any
cut and order before the step's other groups have finished. L = 1/N · Σ_e Σ_τ weight_τ ℓ_τ, with T_τ the targets of τ,
E = Σ_τ |T_τ| over the K selected trajectories of episode e, and V the valid episodes of the step. Episodes of groups
without gradient count in N like all others.

To add a reduction: a class with its formula in its docstring, and its name in ``REDUCTIONS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol


class Reduction(Protocol):
    def weights(self, targets: Sequence[int]) -> list[float]:
        """weight_τ of each trajectory of an episode, from their |T_τ| > 0."""

    def normaliser(self, targets: Sequence[int]) -> int:
        """A group's part of N, from the E of each of its valid episodes."""


class EpisodeTokens:
    """L = 1/|V| · Σ_e Σ_τ (|T_τ| / E) ℓ_τ: each episode weighs 1, and extra branches add no weight."""

    def weights(self, targets: Sequence[int]) -> list[float]:
        total = sum(targets)
        return [count / total for count in targets]

    def normaliser(self, targets: Sequence[int]) -> int:
        return len(targets)


class EpisodeTrajectories:
    """L = 1/|V| · Σ_e Σ_τ ℓ_τ / K: each episode weighs 1, and its trajectories weigh the same."""

    def weights(self, targets: Sequence[int]) -> list[float]:
        return [1.0 / len(targets) for _ in targets]

    def normaliser(self, targets: Sequence[int]) -> int:
        return len(targets)


class Tokens:
    """L = 1/(Σ_e E) · Σ_e Σ_τ |T_τ| ℓ_τ: the mean over all target tokens of the step, so long episodes weigh more."""

    def weights(self, targets: Sequence[int]) -> list[float]:
        return [float(count) for count in targets]

    def normaliser(self, targets: Sequence[int]) -> int:
        return sum(targets)


REDUCTIONS: Final[dict[str, Reduction]] = {
    "episode_tokens": EpisodeTokens(),
    "episode_trajectories": EpisodeTrajectories(),
    "tokens": Tokens(),
}
