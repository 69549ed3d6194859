"""Advantages of a group's episodes, over episodes and never over trajectories.

Invariant: an excluded episode (reward None) has no advantage and influences no other; excluded isn't zero.

To add an advantage: a function of the valid rewards with its formula in its docstring, in ``ADVANTAGES`` here, and its
name in ``trajectory.config``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from trajectory.columns import Float64

STD_EPSILON: Final = 1e-6
MIN_SPREAD: Final = 1e-4

Reason = Literal["", "too_few", "no_variance", "no_tokens"]
"""Why a group gives no gradient; empty when it gives one."""


def group(rewards: Float64) -> Float64:
    """Â_e = (r_e − mean V) / (std V + 1e-6), population standard deviation."""
    return mean_only(rewards) / (float(rewards.std()) + STD_EPSILON)


def leave_one_out(rewards: Float64) -> Float64:
    """Â_e = r_e − mean(V without e) = |V| / (|V| − 1) · (r_e − mean V) (RLOO, arXiv:2402.14740)."""
    return mean_only(rewards) * (len(rewards) / (len(rewards) - 1))


def mean_only(rewards: Float64) -> Float64:
    """Â_e = r_e − mean V (Dr. GRPO, arXiv:2503.20783)."""
    return rewards - float(rewards.mean())


ADVANTAGES: Final[dict[str, Callable[[Float64], Float64]]] = {
    rule.__name__: rule for rule in (group, leave_one_out, mean_only)
}
"""By name: from the rewards of a group's valid episodes, two or more that aren't all equal, to their Â_e."""


@dataclass(frozen=True)
class GroupAdvantage:
    advantages: tuple[float | None, ...]
    """Â_e of each episode; None for an excluded one, and for all when there is a ``reason``."""
    mean_reward: float | None
    """Over valid episodes; None when there is none."""
    reason: Reason


def group_advantage(
    rewards: Sequence[float | None], targets: Sequence[int], advantage: str = "group"
) -> GroupAdvantage:
    """Â_e of a group's episodes by the rule ``ADVANTAGES[advantage]`` over V, the valid episodes of the group.

    ``rewards`` are in [0, 1], None for an excluded episode; ``targets`` is the number of target tokens of each
    episode. No gradient: ``too_few`` (|V| < 2), ``no_variance`` (max − min < 1e-4), ``no_tokens`` (no valid episode
    has a target). Raises ValueError on a reward that is not a number in [0, 1].
    """
    for position, reward in enumerate(rewards):
        if reward is not None and not 0.0 <= reward <= 1.0:
            raise ValueError(f"reward {reward} of episode {position} of the group is not in [0, 1]")
    valid = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    mean = float(valid.mean()) if len(valid) else None
    reason = _reason(valid, sum(n for n, reward in zip(targets, rewards, strict=True) if reward is not None))
    if reason:
        return GroupAdvantage((None,) * len(rewards), mean, reason)
    values = iter(ADVANTAGES[advantage](valid).tolist())
    return GroupAdvantage(tuple(None if r is None else next(values) for r in rewards), mean, "")


def _reason(valid: Float64, targets: int) -> Reason:
    if len(valid) < 2:
        return "too_few"
    if valid.max() - valid.min() < MIN_SPREAD:
        return "no_variance"
    return "" if targets else "no_tokens"
