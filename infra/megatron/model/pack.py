"""Where a micro-step's tokens lie, what each may attend to, and which of them a context-parallel rank holds.

A trajectory is its own run of tokens behind the tokens of earlier runs, so a micro-step of n tokens holds every shared
prefix once. Attention is described by *pieces*: a contiguous stretch of queries, whose own keys are causal, and spans
of earlier keys that all of these queries see whole. No mask is needed and none is made.

Invariant: whatever the number of ranks, the pieces of all ranks together let a token see exactly the tokens before it
in its trajectory, and itself. Pure geometry in numpy: it knows nothing of tensors, models or processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from trajectory.micro_step import MicroStep

Int64 = npt.NDArray[np.int64]
Span = tuple[int, int]

NOTHING: Final = -1


@dataclass(frozen=True, eq=False)
class Runs:
    """The own runs of s trajectories, as a micro-step has them (see ``MicroStep``)."""

    cu_seqlens: Int64
    """int64[s+1]: the own run of trajectory i is tokens [cu_seqlens[i], cu_seqlens[i+1]), at least one."""
    prefix_of: Int64
    """int64[s]: the earlier trajectory with whose tokens trajectory i begins, -1 for none."""
    prefix_len: Int64
    """int64[s]: how many of its tokens."""

    @classmethod
    def of(cls, micro_step: MicroStep) -> Runs:
        columns = (micro_step.cu_seqlens, micro_step.prefix_of, micro_step.prefix_len)
        return cls(*(column.astype(np.int64) for column in columns))

    @classmethod
    def alone(cls, *lengths: int) -> Runs:
        """Trajectories that share nothing. Raises ValueError when one is empty, or there is none."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"trajectories of {lengths[:8]} tokens: there must be one, and none may be empty")
        none = np.full(len(lengths), NOTHING, np.int64)
        return cls(np.cumsum([0, *lengths], dtype=np.int64), none, np.zeros(len(lengths), np.int64))

    @property
    def tokens(self) -> int:
        """n."""
        return int(self.cu_seqlens[-1])

    @property
    def shared(self) -> bool:
        """Whether a trajectory begins with another's tokens."""
        return bool(self.prefix_len.any())

    @cached_property
    def prefixes(self) -> tuple[tuple[Span, ...], ...]:
        """Per trajectory: the spans of tokens that its prefix consists of, in order; neighbours are not joined."""
        return tuple(tuple(self._prefix(trajectory))[::-1] for trajectory in range(len(self.prefix_of)))

    @cached_property
    def positions(self) -> Int64:
        """int64[n]: index of each token in its trajectory."""
        first = self.cu_seqlens[:-1] - self.prefix_len
        return np.arange(self.tokens) - np.repeat(first, np.diff(self.cu_seqlens))

    @cached_property
    def predecessors(self) -> Int64:
        """int64[n]: where the token before each token is, -1 for the first of a trajectory."""
        before = np.arange(-1, self.tokens - 1)
        last = [spans[-1][1] - 1 if spans else NOTHING for spans in self.prefixes]
        before[self.cu_seqlens[:-1]] = last
        return before

    def _prefix(self, trajectory: int) -> Iterator[Span]:
        """The spans from the last to the first."""
        stop = int(self.prefix_len[trajectory])
        while stop:
            trajectory = int(self.prefix_of[trajectory])
            shared, first = int(self.prefix_len[trajectory]), int(self.cu_seqlens[trajectory])
            if stop > shared:
                yield first, first + stop - shared
                stop = shared


@dataclass(frozen=True)
class Piece:
    """Consecutive queries that see the same earlier keys."""

    queries: Span
    """Among the rank's own tokens."""
    own: Span
    """The same tokens among the keys: causal."""
    before: tuple[Span, ...]
    """Keys that every one of the queries sees."""


@dataclass(frozen=True, eq=False)
class Pack:
    """Runs as ``rank`` of ``ranks`` context-parallel ranks holds them.

    Every run is padded at its end to a multiple of twice the number of ranks, and each rank holds two chunks of it,
    one from each end, so that causal attention costs every rank the same. With one rank nothing is padded. Keys and
    ``cu_seqlens`` count padded tokens.
    """

    runs: Runs
    ranks: int = 1
    rank: int = 0

    @cached_property
    def cu_seqlens(self) -> Int64:
        """int64[s+1]: where the padded runs end."""
        if self.ranks == 1:
            return self.runs.cu_seqlens
        unit = 2 * self.ranks
        lengths = np.diff(self.runs.cu_seqlens)
        return np.concatenate([[0], np.cumsum(-(-lengths // unit) * unit)])

    @cached_property
    def where(self) -> Int64:
        """int64[n]: where each token is among the padded."""
        shift = self.cu_seqlens[:-1] - self.runs.cu_seqlens[:-1]
        return np.arange(self.runs.tokens) + np.repeat(shift, np.diff(self.runs.cu_seqlens))

    @cached_property
    def positions(self) -> Int64:
        """int64[padded]: index in the trajectory; padding goes on counting."""
        first = self.cu_seqlens[:-1] - self.runs.prefix_len
        return np.arange(int(self.cu_seqlens[-1])) - np.repeat(first, np.diff(self.cu_seqlens))

    def held_by(self, rank: int) -> Int64:
        """int64[padded / ranks]: the padded tokens that a rank holds, in its order."""
        return np.concatenate([np.arange(*chunk) for chunks in self._chunks(rank) for chunk in chunks])

    @cached_property
    def held(self) -> Int64:
        """``held_by`` this rank."""
        return self.held_by(self.rank)

    @cached_property
    def gathered(self) -> Int64:
        """int64[padded]: where each padded token is when the ranks' tokens are laid one after the other."""
        return np.argsort(np.concatenate([self.held_by(rank) for rank in range(self.ranks)]))

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What this rank computes."""
        shift = (self.cu_seqlens[:-1] - self.runs.cu_seqlens[:-1]).tolist()
        starts = self.runs.cu_seqlens[:-1]
        pieces, at = [], 0
        for trajectory, chunks in enumerate(self._chunks(self.rank)):
            prefix = []
            for first, stop in self.runs.prefixes[trajectory]:
                moved = shift[int(np.searchsorted(starts, first, side="right")) - 1]
                prefix.append((first + moved, stop + moved))
            for first, stop in chunks:
                begin = int(self.cu_seqlens[trajectory])
                before = [*prefix, (begin, first)] if first > begin else prefix
                pieces.append(Piece((at, at + stop - first), (first, stop), _joined(before)))
                at += stop - first
        return tuple(pieces)

    def _chunks(self, rank: int) -> Iterator[tuple[Span, ...]]:
        """Per trajectory: the spans of padded tokens that a rank holds."""
        for first, stop in pairwise(self.cu_seqlens.tolist()):
            if self.ranks == 1:
                yield ((first, stop),)
                continue
            chunk = (stop - first) // (2 * self.ranks)
            late = first + (2 * self.ranks - 1 - rank) * chunk
            yield (first + rank * chunk, first + (rank + 1) * chunk), (late, late + chunk)


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for first, stop in spans:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((first, stop))
    return tuple(joined)
