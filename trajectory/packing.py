"""Trajectories into packs under a token budget that counts a shared prefix once.

Invariant: every trajectory is in exactly one pack, whole; a pack exceeds the budget only if it is a single
trajectory. What trajectories of an episode share is computed once as long as it fits: only where the trajectories
below a branching of an episode's tree don't fit together are they split there, and the prefix above is computed again.
The result depends on the episodes' names and lengths alone, not on the order in which they are given.

This knows lengths of sequences and of their common beginnings. It does not know tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

PackMembers = list[tuple[int, int]]
"""(episode, trajectory) positions in the input, ordered by the episode's name and the trajectory."""


@dataclass(frozen=True)
class EpisodeShape:
    """The s trajectories of one episode, as far as packing is concerned."""

    name: str
    lengths: Sequence[int]
    """Tokens of each of the s."""
    order: Sequence[int]
    """The s trajectories, sorted so that those with a common beginning are neighbours (as in a dictionary)."""
    common: Sequence[int]
    """common[i]: tokens with which trajectories order[i] and order[i + 1] begin alike; s − 1 numbers."""

    @classmethod
    def unshared(cls, name: str, lengths: Sequence[int]) -> EpisodeShape:
        """Trajectories that are computed whole, whatever they share."""
        return cls(name, lengths, range(len(lengths)), [0] * max(len(lengths) - 1, 0))

    def prefixes(self, trajectories: Sequence[int]) -> list[tuple[int, int]]:
        """For each of some trajectories: which of those before it, by position, has the longest common beginning with
        it, and how many tokens; (-1, 0) for none.

        Of several, the one that isn't itself given those tokens by another.
        """
        rank = {trajectory: position for position, trajectory in enumerate(self.order)}
        seen: list[tuple[int, int]] = []
        prefixes: list[tuple[int, int]] = []
        for position, trajectory in enumerate(trajectories):
            here = (rank[trajectory], position)
            at = bisect_left(seen, here)
            best, shared = -1, 0
            for other, of in seen[max(at - 1, 0) : at + 1]:  # neighbours in the order share the most
                low, high = sorted((other, here[0]))
                common = min(self.common[low:high])
                if common > shared:
                    best, shared = of, common
            while best >= 0 and prefixes[best][1] >= shared:
                best = prefixes[best][0]
            prefixes.append((best, shared))
            insort(seen, here)
        return prefixes


@dataclass(frozen=True)
class Packing:
    packs: list[PackMembers]
    recomputed: int
    """Tokens that are computed again because trajectories that share them had to be split."""


@dataclass(frozen=True)
class _Unit:
    """Trajectories that stay together."""

    tokens: int
    members: tuple[tuple[str, int], ...]
    """(episode's name, trajectory)."""


def pack(shapes: Sequence[EpisodeShape], budget: int) -> Packing:
    """Packs of at most ``budget`` tokens each, of similar size, and few.

    Within an episode, from the deepest branching up: what is below a branching is put into as few units as best-fit
    decreasing finds. Over episodes: into as few packs, the load spread. Raises ValueError when ``budget`` isn't
    positive, or two episodes have one name.
    """
    if budget < 1:
        raise ValueError(f"a token budget of {budget} holds nothing")
    position = {shape.name: i for i, shape in enumerate(shapes)}
    if len(position) < len(shapes):
        raise ValueError("two episodes have the same name")
    units = [unit for shape in shapes for unit in _units(shape, budget)]
    packs = _balanced(units, budget)
    once = sum(sum(shape.lengths) - sum(shape.common) for shape in shapes)
    return Packing(
        packs=[[(position[name], trajectory) for name, trajectory in unit.members] for unit in packs],
        recomputed=sum(unit.tokens for unit in packs) - once,
    )


def _units(shape: EpisodeShape, budget: int) -> list[_Unit]:
    """The units of one episode: a single one if that fits."""
    if not shape.lengths:
        return []
    runs = [[_Unit(shape.lengths[trajectory], ((shape.name, trajectory),))] for trajectory in shape.order]
    between = list(shape.common)
    for shared in sorted(set(between), reverse=True):
        joined, left = [runs[0]], []
        for run, common in zip(runs[1:], between, strict=True):
            if common == shared:
                joined[-1] = joined[-1] + run
            else:
                joined.append(run)
                left.append(common)
        runs = [run if len(run) == 1 else _best_fit(run, budget, shared) for run in joined]
        between = left
    return runs[0]


def _best_fit(units: Sequence[_Unit], budget: int, shared: int = 0) -> list[_Unit]:
    """Units that all begin with the same ``shared`` tokens, into few of at most ``budget`` tokens (one that is larger
    stays alone): the largest first, each where the least room is left."""
    bins: list[list[_Unit]] = []
    sizes: list[int] = []
    rooms: list[tuple[int, int]] = []
    for unit in sorted(units, key=lambda unit: (-unit.tokens, unit.members)):
        at = bisect_left(rooms, (unit.tokens - shared, -1))
        if at < len(rooms):
            _, which = rooms.pop(at)
            bins[which].append(unit)
            sizes[which] += unit.tokens - shared
        else:
            which = len(bins)
            bins.append([unit])
            sizes.append(unit.tokens)
        if sizes[which] <= budget:
            insort(rooms, (budget - sizes[which], which))
    return _joined([*zip(sizes, bins, strict=True)])


def _balanced(units: Sequence[_Unit], budget: int) -> list[_Unit]:
    """As many packs as best-fit decreasing needs; the largest unit first, each where the least is, if that keeps to the
    budget, and otherwise as best-fit decreasing has them."""
    tight = _best_fit(units, budget)
    fit = sorted((u for u in units if u.tokens <= budget), key=lambda unit: (-unit.tokens, unit.members))
    alone = [u for u in units if u.tokens > budget]
    loads = [(0, which) for which in range(len(tight) - len(alone))]
    bins: list[list[_Unit]] = [[] for _ in loads]
    for unit in fit:
        load, which = heappop(loads)
        bins[which].append(unit)
        heappush(loads, (load + unit.tokens, which))
    if max(loads, default=(0, 0))[0] > budget:
        return tight
    return _joined([(sum(unit.tokens for unit in held), held) for held in bins] + [(u.tokens, [u]) for u in alone])


def _joined(packs: Sequence[tuple[int, Sequence[_Unit]]]) -> list[_Unit]:
    units = [
        _Unit(size, tuple(sorted(member for unit in held for member in unit.members))) for size, held in packs if held
    ]
    return sorted(units, key=lambda unit: unit.members)
