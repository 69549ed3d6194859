"""What a step says of itself: how far serving and training disagree, and what became of what was sampled.

Invariant: gauges of groups and of micro-steps add up (``+``) to the step's, in any order and grouping; shares and
quantiles are taken last, in ``summary``. A share of nothing is left out, never zero.

This is pure; it does not know where gauges are stored. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict

from trajectory.additive import add, add_all, quantile
from trajectory.stats import GroupStats

Counts = dict[str, int]
Stored = dict[str, Any] | None
"""What a group or a claim has stored of itself; None when it can't be read."""

SIGNS: Final = ("positive", "negative")


class Gauges(BaseModel):
    """Counts and sums; of one group, one micro-step, a step, or nothing at all (the default)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    groups: int = 0
    groups_without_gradient: Counts = {}
    """By reason."""
    episodes: int = 0
    excluded: Counts = {}
    """Episodes without a reward, by outcome."""
    lengths: dict[str, Counts] = {}
    """``episodes`` and ``excluded`` by least sampled tokens of the bin (``trajectory.stats.LENGTHS``)."""
    rewards: dict[str, dict[str, float]] = {}
    """By task: ``episodes`` that are valid, and the sum of their ``reward``."""
    malformed: dict[str, Counts] = {}
    """By sign of the advantage: ``calls``, ``malformed_calls``, ``malformed_spans``."""
    sampled: Counts = {}
    """Sampled tokens of valid episodes by kind; in a training step they are exactly ``trained`` + ``left_out`` +
    ``without_gradient``."""
    trained: Counts = {}
    left_out: Counts = {}
    """By the selection: dead ends, side calls, and what the cap leaves out."""
    without_gradient: Counts = {}
    """Selected, in a group that gives no gradient."""
    duplicates: int = 0
    """Sampled tokens that coincide with an earlier sample, and count once."""
    trained_by_lag: Counts = {}
    """Trained tokens by staleness: version being trained − version that sampled the token."""
    loss: dict[str, Any] = {}
    """``trajectory.loss.LossStats`` added up, with ``sequence_log_ratio`` by staleness instead of version."""
    unread: int = 0
    """Groups and claims of the step whose statistics could not be read: everything else is without them."""

    def __add__(self, other: Self) -> Self:
        return type(self).model_validate(add(self.model_dump(), other.model_dump()))


def group_gauges(
    stats: GroupStats, *, task: str, excluded: Mapping[str, int], version: int, train: bool = True
) -> Gauges:
    """Of one group. ``excluded`` are its episodes without a reward by outcome; ``version`` is the one that is trained
    (or, with ``train`` false, evaluated: then nothing is trained or left out)."""
    selected = {kind: tokens - stats.left_out.get(kind, 0) for kind, tokens in stats.sampled_by_kind.items()}
    selected = {kind: tokens for kind, tokens in selected.items() if tokens}
    reward = (stats.mean_reward or 0.0) * stats.valid_episodes
    return Gauges(
        groups=1,
        groups_without_gradient={stats.reason: 1} if train and stats.reason else {},
        episodes=stats.valid_episodes + stats.excluded_episodes,
        excluded={outcome: count for outcome, count in excluded.items() if count},
        lengths=stats.lengths,
        rewards={task: {"episodes": stats.valid_episodes, "reward": reward}},
        malformed=stats.malformed,
        sampled=stats.sampled_by_kind,
        trained=selected if train and not stats.reason else {},
        left_out=stats.left_out if train else {},
        without_gradient=selected if train and stats.reason else {},
        duplicates=stats.duplicates,
        trained_by_lag=_by_lag(stats.trained_by_version, version) if train else {},
    )


def loss_gauges(stats: Mapping[str, Any], *, version: int) -> Gauges:
    """Of one micro-step's ``LossStats`` (as a mapping), trained at ``version``."""
    ratios = stats.get("sequence_log_ratio", {})
    return Gauges(loss={**stats, "sequence_log_ratio": _by_lag(ratios, version)})


def combine(parts: Iterable[Gauges]) -> Gauges:
    """The sum of many, faster than one by one."""
    return Gauges.model_validate(add_all(part.model_dump() for part in parts))


def added_up(groups: Iterable[Stored], claims: Iterable[Stored], *, version: int, train: bool) -> Gauges:
    """A step's, from what was stored of each of its groups and of each claim, micro-step -> ``LossStats``, in the order
    in which claims ended: of a micro-step that was trained again the last one counts."""
    groups, claims = list(groups), list(claims)
    trained: dict[str, Any] = {}
    for claim in claims:
        trained.update(claim or {})
    parts = [
        group_gauges(
            GroupStats.model_validate(group["stats"]),
            task=group["task"],
            excluded=group.get("excluded", {}),
            version=version,
            train=train,
        )
        for group in groups
        if group
    ]
    parts += [loss_gauges(trained[ref], version=version) for ref in sorted(trained)]
    return combine([*parts, Gauges(unread=sum(stored is None for stored in [*groups, *claims]))])


def summary(gauges: Gauges) -> dict[str, float]:
    """Few numbers for people and programs, 4 digits each: what each is says ``MEANING``. What can't be told is left
    out; without a training step that is everything about training."""
    loss = gauges.loss
    sampled = sum(gauges.sampled.values())
    trained, lags = sum(gauges.trained_by_lag.values()), {int(lag): n for lag, n in gauges.trained_by_lag.items()}
    sequences = loss.get("sequence_log_ratio", {})
    everywhere = add_all(sequences.values())
    token_top, sequence_top = loss.get("max_token_delta"), loss.get("max_sequence_log_ratio")
    numbers = {
        "token_log_ratio": _share(loss.get("sum_delta"), loss.get("targets")),
        "token_abs": _share(loss.get("sum_abs_delta"), loss.get("targets")),
        "token_p99": _at_most(quantile(loss.get("token_delta", {}), 0.99), token_top),
        "token_max": token_top,
        "sequence_abs": _share(loss.get("sum_abs_sequence_log_ratio"), loss.get("trajectories")),
        "sequence_p50": _at_most(quantile(everywhere, 0.5), sequence_top),
        "sequence_p99": _at_most(quantile(everywhere, 0.99), sequence_top),
        "sequence_max": sequence_top,
        "mismatch_p99": _at_most(quantile(sequences.get("0", {}), 0.99), sequence_top),
        "truncated": _share(loss.get("truncated"), loss.get("units")),
        "trained": _share(sum(gauges.trained.values()), sampled) if _trains(gauges) else None,
        "left_out": _share(sum(gauges.left_out.values()), sampled) if _trains(gauges) else None,
        "no_gradient": _share(sum(gauges.without_gradient.values()), sampled) if _trains(gauges) else None,
        "duplicates": _share(gauges.duplicates, sampled + gauges.duplicates),
        "excluded": _share(sum(gauges.excluded.values()), gauges.episodes),
        "stale": _share(trained - lags.get(0, 0), trained),
        "lag": _share(sum(lag * n for lag, n in lags.items()), trained),
        "unread": gauges.unread or None,
    }
    for sign in SIGNS:
        calls = gauges.malformed.get(sign, {})
        numbers[f"clipped_{sign}"] = _share(loss.get(f"clipped_{sign}"), loss.get(sign))
        numbers[f"outside_{sign}"] = _share(loss.get(f"outside_{sign}"), loss.get(sign))
        numbers[f"malformed_{sign}"] = _share(calls.get("malformed_calls"), calls.get("calls"))
    return {name: float(f"{value:.4g}") for name, value in numbers.items() if value is not None}


MEANING: Final = {
    "token_log_ratio": "mean of log π_θ − log π_behaviour over trained tokens, nats",
    "token_abs": "mean of |log π_θ − log π_behaviour| over trained tokens, nats",
    "token_p99": "its 99th percentile (bins of 15 %, upper edge)",
    "token_max": "its largest",
    "sequence_abs": "mean of |log s_τ| against the behaviour policy over trajectories, nats per token",
    "sequence_p50": "its median (bins of 15 %, upper edge)",
    "sequence_p99": "its 99th percentile (bins of 15 %, upper edge)",
    "sequence_max": "its largest",
    "mismatch_p99": "sequence_p99 of trajectories sampled by the version that is trained: loss.mismatch_p99",
    "clipped_positive": "share of positive advantages whose ratio was clipped",
    "clipped_negative": "share of negative advantages whose ratio was clipped",
    "outside_positive": "share of positive advantages that old = behaviour would clip",
    "outside_negative": "share of negative advantages that old = behaviour would clip",
    "truncated": "share of corrections w cut at C",
    "malformed_positive": "share of calls with a malformed tool call, episodes of positive advantage",
    "malformed_negative": "share of calls with a malformed tool call, episodes of negative advantage",
    "trained": "share of sampled tokens that were trained",
    "left_out": "share of sampled tokens that the selection left out",
    "no_gradient": "share of sampled tokens in groups without gradient",
    "duplicates": "share of all samples that coincide with an earlier one",
    "excluded": "share of episodes that are excluded",
    "stale": "share of trained tokens sampled by an older version",
    "lag": "mean staleness of trained tokens, versions",
    "unread": "groups and claims whose statistics could not be read",
}
"""Of the names in ``summary``."""


def _trains(gauges: Gauges) -> bool:
    return bool(gauges.trained or gauges.left_out or gauges.without_gradient)


def _by_lag(by_version: Mapping[str, Any], version: int) -> dict[str, Any]:
    return {str(version - int(sampled_by)): value for sampled_by, value in by_version.items()}


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _at_most(bound: float | None, top: float | None) -> float | None:
    """A quantile's upper bound can't be above the maximum."""
    return bound if bound is None or top is None else min(bound, top)
