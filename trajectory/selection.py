"""Which trajectories of an episode are trained, and which of them owns each sampled token.

Invariant: every sampled token on a selected path is the target of exactly one selected trajectory, the first in
chronological order that contains it, and every selected trajectory has at least one target.

A node of the tree is shared as a whole or not at all, and what a trajectory owns is the end of its path; so
selection and ownership walk nodes, not tokens. This does not know rewards or weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from trajectory.kinds import TRAINABLE, Kind, Leaf
from trajectory.tree import ROOT, Bool, EpisodeTree, Index


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A selected path, cut after its last target: what follows needs no forward pass."""

    leaf: Leaf
    path: Index
    """intp[length]: column entries of the tree."""
    target: Bool
    """bool[length]: tokens that this trajectory owns."""
    targets: int
    """Number of owned tokens, |T_τ| > 0."""


@dataclass(frozen=True)
class Selection:
    trajectories: list[Trajectory]
    """In chronological order (``seq`` of the leaf)."""
    leaves: dict[Kind, int]
    """Number of leaves by kind, selected or not."""
    sampled: dict[Kind, int]
    """Sampled tokens by kind, each counted once: under the kind of highest precedence whose leaf contains it."""
    left_out: dict[Kind, int]
    """Those of ``sampled`` that are no target. Only dead ends and side calls without a cap."""


def select(tree: EpisodeTree, leaves: Sequence[Leaf], cap: int | None) -> Selection:
    """At most ``cap`` trajectories by precedence of kind; None selects all.

    Within a kind the draw is without replacement and depends on nothing but the episode's id: candidates are
    ordered by the hash of (episode, kind, seq). A candidate that would own no new token isn't selected.
    """
    parents: list[int] = tree.parent.tolist()
    node_of: list[int] = tree.call_node.tolist()
    tokens = tree.sampled_per_node()

    def own(chosen: Sequence[Leaf]) -> list[tuple[Leaf, list[int]]]:
        """Each leaf with the nodes that it is the first to contain; leaves without a sampled one are left out."""
        taken: set[int] = {ROOT}
        owned = []
        for leaf in chosen:
            fresh = []
            node = node_of[leaf.seq]
            while node not in taken:
                taken.add(node)
                fresh.append(node)
                node = parents[node]
            if any(tokens[node] for node in fresh):
                owned.append((leaf, fresh))
        return owned

    candidates = [leaf for leaf in leaves if leaf.kind in TRAINABLE]
    candidates.sort(key=lambda leaf: (TRAINABLE.index(leaf.kind), _draw(tree.episode, leaf), leaf.seq))
    if cap is None:
        chosen = [leaf for leaf, _ in own(candidates)]
    else:
        chosen = []
        for leaf in candidates:
            if len(chosen) >= cap:
                break
            if len(own([*chosen, leaf])) > len(chosen):
                # an earlier call may contain all of one chosen before: that one then owns nothing and makes room
                chosen = [kept for kept, _ in own(sorted([*chosen, leaf], key=_seq))]
    owned = own(sorted(chosen, key=_seq))

    by_precedence = sorted(leaves, key=lambda leaf: (list(Kind).index(leaf.kind), leaf.seq))
    kind_of = {node: leaf.kind for leaf, fresh in own(by_precedence) for node in fresh}
    sampled = Counter[Kind]()
    for node, kind in kind_of.items():
        sampled[kind] += tokens[node]
    trained = Counter[Kind]()
    for node in (node for _, fresh in owned for node in fresh if tokens[node]):
        trained[kind_of[node]] += tokens[node]
    return Selection(
        trajectories=[_trajectory(tree, leaf, node_of[leaf.seq], fresh[-1]) for leaf, fresh in owned],
        leaves=dict(Counter(leaf.kind for leaf in by_precedence)),
        sampled={kind: sampled[kind] for kind in Kind if sampled[kind]},
        left_out={kind: sampled[kind] - trained[kind] for kind in Kind if sampled[kind] > trained[kind]},
    )


def _seq(leaf: Leaf) -> int:
    return leaf.seq


def _draw(episode: str, leaf: Leaf) -> int:
    return xxhash.xxh3_64_intdigest(f"{episode}/{leaf.kind}/{leaf.seq}".encode())


def _trajectory(tree: EpisodeTree, leaf: Leaf, node: int, first_owned: int) -> Trajectory:
    path = tree.path(node)
    target = tree.sampled[path]
    target[: tree.depth[first_owned]] = False
    positions = np.flatnonzero(target)
    length = int(positions[-1]) + 1
    return Trajectory(leaf=leaf, path=path[:length], target=target[:length], targets=len(positions))
