"""One episode of a group, as it is given and as it is built: tree, kinds, selection, weights in a row.

This knows nothing of the group's other episodes, so neither advantages nor packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trajectory.config import TrajectoryConfig
from trajectory.kinds import classify
from trajectory.packing import EpisodeShape
from trajectory.records import CallRecord
from trajectory.reduction import REDUCTIONS
from trajectory.selection import Selection, Trajectory, select
from trajectory.tree import EpisodeTree


@dataclass(frozen=True)
class GradedEpisode:
    episode: str
    records: Sequence[CallRecord]
    """All calls in ``seq`` order. Those of an excluded episode are counted but not examined."""
    reward: float | None
    """In [0, 1]; None excludes the episode."""
    tree: EpisodeTree | None = None
    """Of ``records``; None has it built where it is needed."""


@dataclass(frozen=True)
class BuiltEpisode:
    """A valid episode: what was selected of its tree, and how that is packed and weighted."""

    tree: EpisodeTree
    selection: Selection
    shape: EpisodeShape
    weights: list[float]

    @property
    def targets(self) -> int:
        return sum(t.targets for t in self.selection.trajectories)


def build(episode: GradedEpisode, config: TrajectoryConfig) -> BuiltEpisode:
    """Raises RecordError when the records are not one complete episode."""
    tree = episode.tree or EpisodeTree.from_records(episode.records)
    selection = select(
        tree, classify(episode.records), config.cap, draw=config.draw, summary_reserve=config.summary_reserve
    )
    trajectories = selection.trajectories
    weights = REDUCTIONS[config.reduction].weights([t.targets for t in trajectories])
    return BuiltEpisode(tree, selection, _shape_of(tree, trajectories, config.share_prefixes), weights)


def _shape_of(tree: EpisodeTree, trajectories: Sequence[Trajectory], shared: bool) -> EpisodeShape:
    """The trajectories' lengths and, if prefixes are shared, common beginnings: whole nodes of the tree, but for the
    node in which one of two ends."""
    lengths = [t.length for t in trajectories]
    if not shared:
        return EpisodeShape.unshared(tree.episode, lengths)
    order = sorted(range(len(trajectories)), key=lambda i: (trajectories[i].nodes, lengths[i]))
    common = []
    for i, j in pairwise(order):
        nodes, following = trajectories[i].nodes, trajectories[j].nodes
        differ = next((k for k, (a, b) in enumerate(zip(nodes, following, strict=False)) if a != b), len(nodes))
        together = int(tree.depth[nodes[differ]]) if differ < len(nodes) else lengths[i]
        common.append(min(together, lengths[i], lengths[j]))
    return EpisodeShape(tree.episode, lengths, order, common)
