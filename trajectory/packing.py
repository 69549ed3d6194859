"""Trajectories into micro-steps under a token budget.

Invariant: every trajectory is in exactly one pack, whole; a pack exceeds the budget only if it is a single
trajectory. Trajectories of one episode stay together where the budget allows, because shared prefixes can only
be computed once where they meet. The result depends on the lengths and their order alone.
"""

from __future__ import annotations

from collections.abc import Sequence

Pack = list[tuple[int, int]]
"""(episode, trajectory) positions in the input, increasing."""


def pack(lengths: Sequence[Sequence[int]], budget: int) -> list[Pack]:
    """Packs for ``lengths[episode][trajectory]`` tokens, at most ``budget`` tokens each.

    An episode above the budget is cut between trajectories, in their order; then first-fit decreasing over the
    pieces. Raises ValueError when ``budget`` isn't positive.
    """
    if budget < 1:
        raise ValueError(f"a token budget of {budget} holds nothing")
    pieces = [piece for episode, row in enumerate(lengths) for piece in _pieces(episode, row, budget)]
    pieces.sort(key=lambda piece: (-piece[0], piece[1]))
    used: list[int] = []
    packs: list[Pack] = []
    for size, members in pieces:
        for i, tokens in enumerate(used):
            if tokens + size <= budget:
                used[i] += size
                packs[i] += members
                break
        else:
            used.append(size)
            packs.append(list(members))
    return [sorted(members) for members in packs]


def _pieces(episode: int, row: Sequence[int], budget: int) -> list[tuple[int, Pack]]:
    """Runs of one episode's trajectories, each within the budget or a single trajectory."""
    pieces: list[tuple[int, Pack]] = []
    for trajectory, length in enumerate(row):
        if pieces and pieces[-1][0] + length <= budget:
            size, members = pieces[-1]
            pieces[-1] = (size + length, [*members, (episode, trajectory)])
        else:
            pieces.append((length, [(episode, trajectory)]))
    return pieces
