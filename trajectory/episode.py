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
from trajectory.selection import Selection, select
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

    selection: Selection
    shape: EpisodeShape
    weights: list[float]
    """weight_τ of each selected trajectory."""


def build(episode: GradedEpisode, config: TrajectoryConfig) -> BuiltEpisode:
    """Raises RecordError when the records are not one complete episode."""
    tree = episode.tree or EpisodeTree.from_records(episode.records)
    leaves = classify(episode.records)
    selection = select(tree, leaves, config.cap, draw=config.draw, summary_reserve=config.summary_reserve)
    weights = REDUCTIONS[config.reduction].weights(selection.targets)
    return BuiltEpisode(selection, _shape_of(selection, config.share_prefixes), weights)


def _shape_of(selection: Selection, shared: bool) -> EpisodeShape:
    """The trajectories' lengths and, if prefixes are shared, common beginnings: whole nodes of the tree, but for the
    node in which one of two ends."""
    tree, trajectories = selection.tree, selection.trajectories
    lengths = [t.length for t in trajectories]
    if not shared:
        return EpisodeShape.unshared(tree.episode, lengths)
    order = sorted(range(len(trajectories)), key=lambda i: (trajectories[i].nodes, lengths[i]))
    common = []
    for i, j in pairwise(order):
        pairs = zip(trajectories[i].nodes, trajectories[j].nodes, strict=False)
        branch = next((node for node, other in pairs if node != other), None)
        together = lengths[i] if branch is None else int(tree.depth[branch])
        common.append(min(together, lengths[i], lengths[j]))
    return EpisodeShape(tree.episode, lengths, order, common)
