"""A finished group into micro-steps and statistics: tree, kinds, selection, advantage, weights, packing in a row.

Invariant: the result doesn't depend on the order in which episodes are given. This does no I/O; it does not know
the step, N, or where micro-steps are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory.advantage import group_advantage
from trajectory.config import TrajectoryConfig
from trajectory.episode import BuiltEpisode, GradedEpisode, build
from trajectory.micro_step import MicroStep
from trajectory.packing import EpisodeShape, PackMembers, pack
from trajectory.reduction import REDUCTIONS
from trajectory.selection import Trajectory
from trajectory.stats import GroupStats, group_stats
from trajectory.tree import UNSAMPLED, EpisodeTree


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
    targets = [b.targets if b else 0 for b in built]
    outcome = group_advantage([e.reward for e in episodes], targets, config.advantage)

    micro_steps: list[MicroStep] = []
    recomputed = 0
    if not outcome.reason:
        # an episode without trajectories, excluded or not, has no part in the packing
        shapes = [b.shape if b else EpisodeShape.unshared(e.episode, []) for e, b in zip(episodes, built, strict=True)]
        packing = pack(shapes, config.token_budget)
        recomputed = packing.recomputed
        micro_steps = [_micro_step(members, built, outcome.advantages) for members in packing.packs]
    return ProcessedGroup(
        micro_steps,
        group_stats(episodes, built, outcome, micro_steps),
        normaliser=REDUCTIONS[config.reduction].normaliser([b.targets for b in built if b]),
        recomputed_tokens=recomputed,
    )


def _micro_step(
    members: PackMembers, built: Sequence[BuiltEpisode | None], advantages: Sequence[float | None]
) -> MicroStep:
    """The pack's trajectories, each from where what it shares with an earlier one ends.

    An owned token is on no earlier selected path, so a shared prefix has no target of the later trajectory.
    """
    rows: list[_Row] = []
    names: list[str] = []
    prefix_of: list[int] = []
    weight: list[float] = []
    advantage: list[float] = []
    index: list[int] = []
    for position in dict.fromkeys(position for position, _ in members):
        episode, a = built[position], advantages[position]
        if episode is None or a is None:
            raise ValueError(f"pack {members} contains an excluded episode")
        mine = sorted(trajectory for of, trajectory in members if of == position)
        first = len(rows)
        for which, (of, shared) in zip(mine, episode.shape.prefixes(mine), strict=True):
            rows.append(_Row(episode.tree, episode.selection.trajectories[which], shared))
            prefix_of.append(first + of if of >= 0 else -1)
            weight.append(episode.weights[which])
            advantage.append(a)
            index.append(len(names))
        names.append(episode.tree.episode)
    cu_seqlens = np.cumsum([0, *(row.trajectory.length - row.shared for row in rows)], dtype=np.int32)
    columns = _Columns(rows, cu_seqlens.tolist())
    return MicroStep(
        ids=columns.everywhere("ids"),
        cu_seqlens=cu_seqlens,
        prefix_of=np.asarray(prefix_of, np.int32),
        prefix_len=np.asarray([row.shared for row in rows], np.int32),
        target=columns.of_targets("sampled", False),
        **{name: columns.of_targets(name, fill) for name, (_, fill) in UNSAMPLED.items()},
        advantage=np.asarray(advantage, np.float64),
        weight=np.asarray(weight, np.float64),
        episode_index=np.asarray(index, np.int32),
        episodes=tuple(names),
        kinds=tuple(str(row.trajectory.leaf.kind) for row in rows),
    )


@dataclass(frozen=True)
class _Row:
    tree: EpisodeTree
    trajectory: Trajectory
    shared: int


class _Columns:
    """Columns of a micro-step, copied from the trees run by run."""

    def __init__(self, rows: Sequence[_Row], starts: Sequence[int]) -> None:
        self._tokens = starts[-1]
        self._before: list[tuple[EpisodeTree, list[tuple[int, int]], int]] = []
        """Of each row: what stands before its own part; the entries of the tree, and where they go."""
        self._own: list[tuple[EpisodeTree, list[tuple[int, int]], int]] = []
        for row, start in zip(rows, starts, strict=False):
            t = row.trajectory
            if row.shared > t.own:
                raise ValueError(f"call {t.leaf.seq} of episode {row.tree.episode} owns tokens that it shares")
            self._before.append((row.tree, t.spans(row.shared, t.own), start))
            self._own.append((row.tree, t.spans(t.own, t.length), start + t.own - row.shared))

    def everywhere(self, name: str) -> npt.NDArray[Any]:
        return self._fill(np.empty(self._tokens, self._dtype(name)), name, [*self._before, *self._own])

    def of_targets(self, name: str, fill: float) -> npt.NDArray[Any]:
        """``fill`` where nothing is a target: the tree has it where nothing was sampled."""
        column = np.empty(self._tokens, self._dtype(name))
        for _, spans, at in self._before:
            column[at : at + sum(end - begin for begin, end in spans)] = fill
        return self._fill(column, name, self._own)

    def _dtype(self, name: str) -> npt.DTypeLike:
        dtype: npt.DTypeLike = getattr(self._own[0][0], name).dtype
        return dtype

    def _fill(
        self, column: npt.NDArray[Any], name: str, parts: Sequence[tuple[EpisodeTree, list[tuple[int, int]], int]]
    ) -> npt.NDArray[Any]:
        for tree, spans, at in parts:
            values = getattr(tree, name)
            where = at
            for begin, end in spans:
                column[where : where + end - begin] = values[begin:end]
                where += end - begin
        return column
