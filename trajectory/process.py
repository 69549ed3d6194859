"""A finished group into micro-steps and statistics: tree, kinds, selection, advantage, weights, packing in a row.

Invariant: the result doesn't depend on the order in which episodes are given. This does no I/O; it does not know
the step, N, or where micro-steps are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from trajectory.advantage import group_advantage
from trajectory.kinds import classify
from trajectory.micro_step import MicroStep
from trajectory.packing import Pack, pack
from trajectory.records import CallRecord
from trajectory.selection import Selection, Trajectory, select
from trajectory.stats import GroupStats, group_stats
from trajectory.tree import EpisodeTree

Reduction = Literal["episode_tokens", "episode_trajectories"]


class TrajectoryConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    cap: int | None = Field(default=5, ge=1)
    """Trajectories of one episode at most; None trains all."""

    reduction: Reduction = "episode_tokens"
    """How ℓ_τ of an episode's K trajectories add up to ℓ_e. ``episode_tokens``: Σ_τ (|T_τ| / E) ℓ_τ with
    E = Σ_τ |T_τ|, so extra branches add no weight. ``episode_trajectories``: Σ_τ ℓ_τ / K."""

    token_budget: int = Field(default=8192, ge=1)
    """Tokens of one micro-step at most; only a single longer trajectory exceeds it."""


@dataclass(frozen=True)
class EpisodeInput:
    episode: str
    records: Sequence[CallRecord]
    """All calls in ``seq`` order. Those of an excluded episode are counted but not examined."""
    reward: float | None
    """In [0, 1]; None excludes the episode."""


@dataclass(frozen=True)
class ProcessedGroup:
    micro_steps: list[MicroStep]
    """Empty exactly when ``stats.reason`` is not."""
    stats: GroupStats


@dataclass(frozen=True)
class _Episode:
    tree: EpisodeTree
    selection: Selection
    weights: list[float]

    @property
    def targets(self) -> int:
        return sum(t.targets for t in self.selection.trajectories)


def process_group(episodes: Sequence[EpisodeInput], config: TrajectoryConfig) -> ProcessedGroup:
    """Micro-steps of one group.

    Raises RecordError, naming the episode, when a valid episode's records are not one complete episode, and
    ValueError on a repeated episode id or a reward outside [0, 1].
    """
    episodes = sorted(episodes, key=lambda e: e.episode)
    for one, other in pairwise(episodes):
        if one.episode == other.episode:
            raise ValueError(f"episode {one.episode} is twice in its group")
    built = [None if e.reward is None else _build(e, config) for e in episodes]
    outcome = group_advantage([e.reward for e in episodes], [b.targets if b else 0 for b in built])

    micro_steps: list[MicroStep] = []
    if not outcome.reason:
        lengths = [[len(t.path) for t in b.selection.trajectories] if b else [] for b in built]
        micro_steps = [
            _micro_step(members, built, outcome.advantages) for members in pack(lengths, config.token_budget)
        ]
    return ProcessedGroup(micro_steps, group_stats(episodes, built, outcome, micro_steps))


def _build(episode: EpisodeInput, config: TrajectoryConfig) -> _Episode:
    tree = EpisodeTree.from_records(episode.records)
    selection = select(tree, classify(episode.records), config.cap)
    return _Episode(tree, selection, reduction_weights([t.targets for t in selection.trajectories], config.reduction))


def reduction_weights(targets: Sequence[int], reduction: Reduction) -> list[float]:
    """Factor of each ℓ_τ of an episode whose trajectories have these numbers of targets; they sum to 1."""
    if reduction == "episode_trajectories":
        return [1.0 / len(targets) for _ in targets]
    total = sum(targets)
    return [count / total for count in targets]


def _micro_step(members: Pack, built: Sequence[_Episode | None], advantages: Sequence[float | None]) -> MicroStep:
    rows: list[tuple[EpisodeTree, Trajectory]] = []
    names: dict[str, int] = {}
    index, weight, advantage = [], [], []
    for position, which in members:
        episode, a = built[position], advantages[position]
        if episode is None or a is None:
            raise ValueError(f"pack {members} contains an excluded episode")
        rows.append((episode.tree, episode.selection.trajectories[which]))
        index.append(names.setdefault(episode.tree.episode, len(names)))
        weight.append(episode.weights[which])
        advantage.append(a)
    target = np.concatenate([t.target for _, t in rows])

    def column(name: str, fill: float) -> npt.NDArray[Any]:
        values = np.concatenate([getattr(tree, name)[t.path] for tree, t in rows])
        values[~target] = fill
        return values

    return MicroStep(
        ids=np.concatenate([tree.ids[t.path] for tree, t in rows]),
        cu_seqlens=np.cumsum([0, *(len(t.path) for _, t in rows)], dtype=np.int32),
        prefix_of=np.full(len(rows), -1, np.int32),
        prefix_len=np.zeros(len(rows), np.int32),
        target=target,
        behaviour=column("behaviour", 0.0),
        temperature=column("temperature", 1.0),
        version=column("version", -1),
        call=column("call", -1),
        offset=column("offset", -1),
        advantage=np.asarray(advantage, np.float64),
        weight=np.asarray(weight, np.float64),
        episode_index=np.asarray(index, np.int32),
        episodes=tuple(names),
        kinds=tuple(str(t.leaf.kind) for _, t in rows),
    )
