"""A finished group into micro-steps and statistics: its episodes built, advantages, packing, columns in a row.

Invariant: the result doesn't depend on the order in which episodes are given. This does no I/O; it does not know
the step, N, or where micro-steps are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory.advantage import group_advantage
from trajectory.columns import SAMPLED
from trajectory.config import TrajectoryConfig
from trajectory.episode import BuiltEpisode, GradedEpisode, build
from trajectory.micro_step import MicroStep
from trajectory.packing import PackMembers, pack
from trajectory.reduction import REDUCTIONS
from trajectory.selection import Trajectory
from trajectory.stats import GroupStats, group_stats


@dataclass(frozen=True)
class ProcessedGroup:
    micro_steps: list[MicroStep]
    """Empty exactly when ``stats.reason`` is not."""
    stats: GroupStats
    normaliser: int
    """The group's part of the step's N, whether the group gives a gradient or not."""
    recomputed_tokens: int
    """Tokens of the micro-steps that are computed again because trajectories that share them had to be split."""


def process_group(episodes: Sequence[GradedEpisode], config: TrajectoryConfig) -> ProcessedGroup:
    """Micro-steps of one group.

    Raises RecordError, naming the episode, when a valid episode's records are not one complete episode, and
    ValueError on a repeated episode id or a reward outside [0, 1].
    """
    episodes = sorted(episodes, key=lambda e: e.episode)
    for episode, following in pairwise(episodes):
        if episode.episode == following.episode:
            raise ValueError(f"episode {episode.episode} is twice in its group")
    built = [None if e.reward is None else build(e, config) for e in episodes]
    targets = [sum(b.selection.targets) if b else 0 for b in built]
    outcome = group_advantage([e.reward for e in episodes], targets, config.advantage)
    trained = [(b, a) for b, a in zip(built, outcome.advantages, strict=True) if b and a is not None]
    packing = pack([b.shape for b, _ in trained], config.token_budget)
    micro_steps = [_micro_step(members, trained) for members in packing.packs]
    return ProcessedGroup(
        micro_steps,
        group_stats(episodes, built, outcome, micro_steps),
        normaliser=REDUCTIONS[config.reduction].normaliser([n for n, b in zip(targets, built, strict=True) if b]),
        recomputed_tokens=packing.recomputed,
    )


@dataclass(frozen=True)
class _Row:
    """A trajectory in a micro-step: its own run begins where what it shares with an earlier row ends."""

    trajectory: Trajectory
    weight: float
    advantage: float
    prefix_of: int
    """The earlier row, -1 for none."""
    shared: int
    """Tokens. Owned tokens are on no earlier selected path, so none of them is a target of this row."""

    @cached_property
    def context(self) -> list[tuple[int, int]]:
        """Runs of tree entries: the own run as far as no token is owned."""
        return self.trajectory.spans(self.shared, self.trajectory.own)

    @cached_property
    def owned(self) -> list[tuple[int, int]]:
        """Runs of tree entries: the rest, where what was sampled is a target."""
        return self.trajectory.spans(self.trajectory.own, self.trajectory.length)


def _micro_step(members: PackMembers, trained: Sequence[tuple[BuiltEpisode, float]]) -> MicroStep:
    """``trained``: the episodes of the group that give a gradient, with their advantages."""
    rows: list[_Row] = []
    for position, of_episode in groupby(members, key=itemgetter(0)):
        (episode, advantage), first = trained[position], len(rows)
        mine = [which for _, which in of_episode]
        for which, (of, shared) in zip(mine, episode.shape.prefixes(mine), strict=True):
            trajectory, weight = episode.selection.trajectories[which], episode.weights[which]
            if shared > trajectory.own:
                seq, name = trajectory.leaf.seq, trajectory.tree.episode
                raise ValueError(f"call {seq} of episode {name} owns tokens that it shares")
            rows.append(_Row(trajectory, weight, advantage, first + of if of >= 0 else -1, shared))
    names = [row.trajectory.tree.episode for row in rows]
    episodes = tuple(dict.fromkeys(names))
    return MicroStep(
        ids=_column(rows, "ids"),
        cu_seqlens=np.cumsum([0, *(row.trajectory.length - row.shared for row in rows)], dtype=np.int32),
        prefix_of=np.asarray([row.prefix_of for row in rows], np.int32),
        prefix_len=np.asarray([row.shared for row in rows], np.int32),
        target=_column(rows, "sampled", unowned=False),
        **{name: _column(rows, name, unowned=fill) for name, (_, fill) in SAMPLED.items()},
        advantage=np.asarray([row.advantage for row in rows], np.float64),
        weight=np.asarray([row.weight for row in rows], np.float64),
        episode_index=np.asarray([episodes.index(name) for name in names], np.int32),
        episodes=episodes,
        kinds=tuple(str(row.trajectory.leaf.kind) for row in rows),
    )


def _column(rows: Sequence[_Row], name: str, unowned: float | None = None) -> npt.NDArray[Any]:
    """A column of the rows' trees, run by run. ``unowned`` stands before what a row owns; None has the tree's own
    there. (Behind it, where nothing was sampled, the tree has that value.)"""
    runs: list[npt.NDArray[Any]] = []
    for row in rows:
        column = getattr(row.trajectory.tree, name)
        if unowned is None:
            runs += [column[start:end] for start, end in row.context]
        else:
            runs.append(np.full(row.trajectory.own - row.shared, unowned, column.dtype))
        runs += [column[start:end] for start, end in row.owned]
    return np.concatenate(runs)
