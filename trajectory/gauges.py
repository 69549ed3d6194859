"""What a step says of itself: how far serving and training disagree, and what became of what was sampled.

Invariant: gauges of groups and of micro-steps add up (``combine``) to the step's, in any order and grouping; shares and
quantiles are taken last, in ``summary``. A share of nothing is left out, never zero.

This is pure; it does not know where gauges are stored. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from trajectory.additive import add_all, quantile
from trajectory.stats import GroupStats

Counts = dict[str, int]
Stored = dict[str, Any] | None
"""What a group or a claim has stored of itself; None when it can't be read."""


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
    """The sum of all; of nothing, gauges of nothing."""
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
"""Of a step's figures, in the order in which they are shown."""


def summary(gauges: Gauges) -> dict[str, float]:
    """The figures of ``MEANING`` for people and programs, 4 digits each. What can't be told is left out; without a
    training step that is everything about training."""
    loss = gauges.loss
    ratios = loss.get("sequence_log_ratio", {})
    everywhere = add_all(ratios.values())
    lags = {int(lag): tokens for lag, tokens in gauges.trained_by_lag.items()}
    sampled, trained = sum(gauges.sampled.values()), sum(lags.values())
    trains = gauges.trained or gauges.left_out or gauges.without_gradient

    def mean(total: str, count: str) -> float | None:
        return _share(loss.get(total), loss.get(count))

    def at_most(q: float, histogram: Counts, largest: str) -> float | None:
        """A quantile's upper bound, which can't be above the maximum."""
        bound = quantile(histogram, q)
        return bound if bound is None else min(bound, loss.get(largest, bound))

    def of_sampled(tokens: Counts) -> float | None:
        return _share(sum(tokens.values()), sampled) if trains else None

    figures = {
        "token_log_ratio": mean("sum_delta", "targets"),
        "token_abs": mean("sum_abs_delta", "targets"),
        "token_p99": at_most(0.99, loss.get("token_delta", {}), "max_token_delta"),
        "token_max": loss.get("max_token_delta"),
        "sequence_abs": mean("sum_abs_sequence_log_ratio", "trajectories"),
        "sequence_p50": at_most(0.5, everywhere, "max_sequence_log_ratio"),
        "sequence_p99": at_most(0.99, everywhere, "max_sequence_log_ratio"),
        "sequence_max": loss.get("max_sequence_log_ratio"),
        "mismatch_p99": at_most(0.99, ratios.get("0", {}), "max_sequence_log_ratio"),
        "truncated": mean("truncated", "units"),
        "trained": of_sampled(gauges.trained),
        "left_out": of_sampled(gauges.left_out),
        "no_gradient": of_sampled(gauges.without_gradient),
        "duplicates": _share(gauges.duplicates, sampled + gauges.duplicates),
        "excluded": _share(sum(gauges.excluded.values()), gauges.episodes),
        "stale": _share(trained - lags.get(0, 0), trained),
        "lag": _share(sum(lag * tokens for lag, tokens in lags.items()), trained),
        "unread": gauges.unread or None,
    }
    for sign in ("positive", "negative"):
        calls = gauges.malformed.get(sign, {})
        figures |= {f"{kind}_{sign}": mean(f"{kind}_{sign}", sign) for kind in ("clipped", "outside")}
        figures[f"malformed_{sign}"] = _share(calls.get("malformed_calls"), calls.get("calls"))
    return {name: float(f"{figures[name]:.4g}") for name in MEANING if figures[name] is not None}


def _by_lag(by_version: Mapping[str, Any], version: int) -> dict[str, Any]:
    return {str(version - int(sampled_by)): value for sampled_by, value in by_version.items()}


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
