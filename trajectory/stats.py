"""What is worth knowing about a processed group.

Invariant: tokens and trajectories are counted over valid episodes only, each sampled token once. This does not know
how a group is cut into micro-steps, nor the group's place in a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from pydantic import BaseModel, ConfigDict

from trajectory.additive import add_all
from trajectory.advantage import GroupAdvantage, Reason
from trajectory.episode import BuiltEpisode, GradedEpisode
from trajectory.kinds import Kind
from trajectory.micro_step import MicroStep
from trajectory.records import CallRecord

LENGTHS: Final = (0, 1, *(4**k for k in range(3, 13)))
"""Bins of an episode's length in sampled tokens, by their least: none, fewer than 64, and then by fours."""


class GroupStats(BaseModel):
    """Tokens and trajectories are those of valid episodes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    valid_episodes: int
    excluded_episodes: int
    mean_reward: float | None
    """Over valid episodes; None when there is none."""
    reason: Reason
    """Why the group gives no gradient; empty when it does."""
    micro_steps: int
    leaves: dict[str, int]
    """Leaves by kind, selected or not; dead ends and side calls included."""
    trajectories: dict[str, int]
    """Selected trajectories by kind, whether the group gives a gradient or not."""
    sampled_tokens: int
    """Sampled tokens, each counted once however many paths contain it."""
    sampled_by_kind: dict[str, int]
    """``sampled_tokens`` by kind of highest precedence that contains the token."""
    trained_tokens: int
    """Target tokens in the micro-steps."""
    left_out: dict[str, int]
    """Sampled tokens by kind that the selection left out."""
    dead_tokens: int
    """Sampled tokens that lie on dead ends only."""
    duplicates: int
    """Sampled tokens that coincide with an earlier sample."""
    packed_tokens: int
    """Tokens in the micro-steps, prompt included."""
    trained_by_version: dict[str, int]
    """Target tokens by the weight version that sampled them (a JSON key: decimal), oldest first."""
    oldest_version: int | None
    """Oldest weight version among the target tokens; None without any."""
    newest_version: int | None
    active_s: float
    """Seconds that calls spent sampling, excluded episodes included."""
    held_s: float
    """Seconds that calls were held, excluded episodes included."""
    malformed: dict[str, dict[str, int]] = {}
    """By sign of the episode's advantage: ``calls``, ``malformed_calls`` (with a tool call that is none) and
    ``malformed_spans``. ``positive``, ``negative``, ``zero`` (also every valid episode of a group without gradient)."""
    lengths: dict[str, dict[str, int]] = {}
    """``episodes`` and ``excluded`` by sampled tokens of an episode, whatever became of them: ``LENGTHS``, by the least
    length of the bin (decimal)."""


def group_stats(
    episodes: Sequence[GradedEpisode],
    built: Sequence[BuiltEpisode | None],
    outcome: GroupAdvantage,
    micro_steps: Sequence[MicroStep],
) -> GroupStats:
    """Of one group. ``built`` and ``outcome.advantages`` are by position of ``episodes``, None for an excluded one."""
    valid = [b.selection for b in built if b]
    calls = [record for episode in episodes for record in episode.records]
    sampled = _by_kind(s.sampled for s in valid)
    versions = Counter[int]()
    for micro_step in micro_steps:
        values, counts = np.unique(micro_step.version[micro_step.target], return_counts=True)
        versions.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    malformed = add_all(
        {_sign(advantage): _malformed(episode.records)}
        for episode, advantage in zip(episodes, outcome.advantages, strict=True)
        if episode.reward is not None
    )
    lengths = add_all({_least_length(e.records): {"episodes": 1, "excluded": int(e.reward is None)}} for e in episodes)
    return GroupStats(
        valid_episodes=len(valid),
        excluded_episodes=len(episodes) - len(valid),
        mean_reward=outcome.mean_reward,
        reason=outcome.reason,
        micro_steps=len(micro_steps),
        leaves=_by_kind(s.leaves for s in valid),
        trajectories=_by_kind(Counter(t.leaf.kind for t in s.trajectories) for s in valid),
        sampled_tokens=sum(sampled.values()),
        sampled_by_kind=sampled,
        trained_tokens=versions.total(),
        left_out=_by_kind(s.left_out for s in valid),
        dead_tokens=sampled.get("dead", 0),
        duplicates=sum(s.tree.duplicates for s in valid),
        packed_tokens=sum(m.tokens for m in micro_steps),
        trained_by_version={str(version): versions[version] for version in sorted(versions)},
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        active_s=sum(record.active_s for record in calls),
        held_s=sum(record.held_s for record in calls),
        malformed=dict(sorted(malformed.items())),
        lengths={least: lengths[least] for least in sorted(lengths, key=int)},
    )


def _sign(advantage: float | None) -> str:
    return "zero" if not advantage else "positive" if advantage > 0 else "negative"


def _malformed(records: Sequence[CallRecord]) -> dict[str, int]:
    spans = [record.malformed for record in records]
    return {"calls": len(spans), "malformed_calls": sum(n > 0 for n in spans), "malformed_spans": sum(spans)}


def _least_length(records: Sequence[CallRecord]) -> str:
    """Of the bin in ``LENGTHS`` that the episode's sampled tokens fall into."""
    sampled = sum(len(record.output_ids) for record in records)
    return str(LENGTHS[bisect_right(LENGTHS, sampled) - 1])


def _by_kind(parts: Iterable[Mapping[Kind, int]]) -> dict[str, int]:
    """Sum over episodes, in the order of precedence."""
    total = Counter[Kind]()
    for part in parts:
        total.update(part)
    return {str(kind): total[kind] for kind in Kind if total[kind]}
