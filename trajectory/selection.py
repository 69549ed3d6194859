"""Which trajectories of an episode are trained, and which of them owns each sampled token.

Invariant: every sampled token on a selected path is the target of exactly one selected trajectory, the first in
chronological order that contains it, and every selected trajectory has at least one target.

A node of the tree is shared as a whole or not at all, and what a trajectory owns is the end of its path; so
selection and ownership walk nodes, not tokens. This does not know rewards or weights.

To add an order of drawing: a function with its rule in its docstring, in ``DRAWS`` here, and its name in
``trajectory.config``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

import numpy as np
import xxhash

from trajectory.columns import Bool, Index
from trajectory.kinds import TRAINABLE, Kind, Leaf
from trajectory.tree import ROOT, EpisodeTree

SUMMARIES: Final = (Kind.MAIN_SUMMARY, Kind.SUB_AGENT_SUMMARY)


def seeded(tree: EpisodeTree, leaf: Leaf) -> int:
    """Without replacement, with a seed that is nothing but the episode's id: by the hash of (episode, kind, seq)."""
    return xxhash.xxh3_64_intdigest(f"{tree.episode}/{leaf.kind}/{leaf.seq}".encode())


def chronological(tree: EpisodeTree, leaf: Leaf) -> int:
    """The earliest first."""
    return leaf.seq


def longest(tree: EpisodeTree, leaf: Leaf) -> int:
    """The path with the most tokens, prompts included, first; of equal ones the earliest."""
    node = tree.call_node[leaf.seq]
    return -int(tree.depth[node] + tree.end[node] - tree.start[node])


DRAWS: Final[dict[str, Callable[[EpisodeTree, Leaf], int]]] = {
    draw.__name__: draw for draw in (seeded, chronological, longest)
}
"""By name: the key by which the candidates of one kind are tried, smallest first."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A selected path, cut after its last target: what follows needs no forward pass."""

    leaf: Leaf
    tree: EpisodeTree = field(repr=False)
    nodes: tuple[int, ...]
    """From the first below the root to the one in which the last target lies."""
    length: int
    """Tokens; the last node may end after them."""
    own: int
    """Tokens before the first node that no earlier selected trajectory contains: from here on, what was sampled is a
    target."""
    targets: int
    """Number of owned tokens, |T_τ| > 0."""

    def spans(self, first: int, stop: int) -> list[tuple[int, int]]:
        """The column entries of tokens [first, stop), as few runs [start, end) as possible."""
        spans: list[tuple[int, int]] = []
        for node in self.nodes:
            depth, start = int(self.tree.depth[node]), int(self.tree.start[node])
            begin = start + max(first - depth, 0)
            end = min(int(self.tree.end[node]), start + stop - depth)
            if begin >= end:
                continue
            if spans and spans[-1][1] == begin:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((begin, end))
        return spans

    @property
    def path(self) -> Index:
        """intp[length]: column entries of the tree."""
        return np.concatenate([np.arange(*span, dtype=np.intp) for span in self.spans(0, self.length)])

    @property
    def target(self) -> Bool:
        """bool[length]: tokens that this trajectory owns."""
        target = self.tree.sampled[self.path]
        target[: self.own] = False
        return target


@dataclass(frozen=True)
class Selection:
    tree: EpisodeTree = field(repr=False)
    trajectories: list[Trajectory]
    """In chronological order (``seq`` of the leaf)."""
    leaves: dict[Kind, int]
    """Number of leaves by kind, selected or not."""
    sampled: dict[Kind, int]
    """Sampled tokens by kind, each counted once: under the kind of highest precedence whose leaf contains it."""
    left_out: dict[Kind, int]
    """Those of ``sampled`` that are no target. Only dead ends and side calls without a cap."""

    @property
    def targets(self) -> list[int]:
        """|T_τ| of each trajectory."""
        return [trajectory.targets for trajectory in self.trajectories]


def select(
    tree: EpisodeTree, leaves: Sequence[Leaf], cap: int | None, *, draw: str = "seeded", summary_reserve: int = 0
) -> Selection:
    """At most ``cap`` trajectories by precedence of kind (None selects all), within a kind as ``DRAWS[draw]`` says.

    A candidate that would own no new token isn't selected. The first ``summary_reserve`` places go to summaries, by
    the same order, as far as there are any; the rest of the cap to whatever comes first.
    """
    chronologically = attrgetter("seq")
    parents: list[int] = tree.parent.tolist()
    node_of: list[int] = tree.call_node.tolist()
    tokens = tree.sampled_per_node()

    def own(chosen: Iterable[Leaf]) -> list[tuple[Leaf, list[int]]]:
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

    def fill(chosen: list[Leaf], candidates: Sequence[Leaf], places: int) -> list[Leaf]:
        for leaf in candidates:
            if len(chosen) >= places:
                break
            if leaf not in chosen and len(own([*chosen, leaf])) > len(chosen):
                # an earlier call may contain all of one chosen before: that one then owns nothing and makes room
                chosen = [kept for kept, _ in own(sorted([*chosen, leaf], key=chronologically))]
        return chosen

    candidates = [leaf for leaf in leaves if leaf.kind in TRAINABLE]
    candidates.sort(key=lambda leaf: (TRAINABLE.index(leaf.kind), DRAWS[draw](tree, leaf), leaf.seq))
    if cap is None:
        chosen = [leaf for leaf, _ in own(candidates)]
    else:
        summaries = [leaf for leaf in candidates if leaf.kind in SUMMARIES]
        chosen = fill([], summaries, min(summary_reserve, cap))
        chosen = fill(chosen, candidates, cap)
    owned = own(sorted(chosen, key=chronologically))

    by_precedence = sorted(leaves, key=lambda leaf: (list(Kind).index(leaf.kind), leaf.seq))
    kind_of = {node: leaf.kind for leaf, fresh in own(by_precedence) for node in fresh}
    sampled = Counter[Kind]()
    for node, kind in kind_of.items():
        sampled[kind] += tokens[node]
    trained = Counter[Kind]()
    for node in (node for _, fresh in owned for node in fresh if tokens[node]):
        trained[kind_of[node]] += tokens[node]
    return Selection(
        tree,
        trajectories=[_trajectory(tree, leaf, fresh, tokens) for leaf, fresh in owned],
        leaves=dict(Counter(leaf.kind for leaf in by_precedence)),
        sampled={kind: sampled[kind] for kind in Kind if sampled[kind]},
        left_out={kind: sampled[kind] - trained[kind] for kind in Kind if sampled[kind] > trained[kind]},
    )


def _trajectory(tree: EpisodeTree, leaf: Leaf, fresh: Sequence[int], tokens: Sequence[int]) -> Trajectory:
    """``fresh``: the nodes that the leaf owns, the last one first."""
    last = next(node for node in fresh if tokens[node])
    start, end = int(tree.start[last]), int(tree.end[last])
    after = int(tree.sampled[start:end][::-1].argmax())
    return Trajectory(
        leaf=leaf,
        tree=tree,
        nodes=tuple(tree.nodes(last)),
        length=int(tree.depth[last]) + end - start - after,
        own=int(tree.depth[fresh[-1]]),
        targets=sum(tokens[node] for node in fresh),
    )
