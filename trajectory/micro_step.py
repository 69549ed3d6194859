"""The micro-step: a pack of whole trajectories, the unit of one forward and backward pass.

A prefix that trajectories share is there once: a trajectory is the first ``prefix_len`` tokens of an earlier one
(whose own beginning may be shared in turn), then its own run. ``unshared`` writes every trajectory out.

Invariant: equal micro-steps have equal bytes, whoever made them and in which order, so a micro-step's content
hash names it. It carries all that its loss needs, and where each target token was sampled. It does not know the
run, the step or N.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from trajectory.columns import (
    SAMPLED,
    UNREADABLE,
    Bool,
    Float32,
    Float64,
    Index,
    Int32,
    read_columns,
    write_columns,
)

_METADATA: Final = "gyre.micro_step"
_PER_TOKEN: Final[dict[str, type[np.generic]]] = {
    "ids": np.int32,
    "target": np.bool_,
    **{name: dtype for name, (dtype, _) in SAMPLED.items()},
}
_PER_TRAJECTORY: Final[dict[str, type[np.generic]]] = {
    "advantage": np.float64,
    "weight": np.float64,
    "episode_index": np.int32,
    "prefix_of": np.int32,
    "prefix_len": np.int32,
}


class MicroStepError(ValueError):
    """Columns or bytes that are no micro-step."""


@dataclass(frozen=True, eq=False)
class MicroStep:
    """The own runs of s trajectories, n tokens in all, one after the other. Raises MicroStepError when columns do not
    fit.

    Compare two by their bytes.
    """

    ids: Int32
    """int32[n]: token ids."""
    cu_seqlens: Int32
    """int32[s+1]: the own run of trajectory i is tokens [cu_seqlens[i], cu_seqlens[i+1])."""
    prefix_of: Int32
    """int32[s]: the earlier trajectory with whose tokens trajectory i begins, -1 for none."""
    prefix_len: Int32
    """int32[s]: how many of its tokens; 0 exactly where ``prefix_of`` is -1."""
    target: Bool
    """bool[n]: the token is trained here. Never a trajectory's first token; the last one always is."""
    behaviour: Float32
    """float32[n]: behaviour log-probability at ``temperature``, 0 where not target."""
    temperature: Float32
    """float32[n]: temperature that sampled the token, 1 where not target."""
    version: Int32
    """int32[n]: weight version that sampled the token, -1 where not target."""
    call: Int32
    """int32[n]: ``seq`` of the record in which the token was sampled, -1 where not target."""
    offset: Int32
    """int32[n]: index of the token in that record's output, -1 where not target."""
    advantage: Float64
    """float64[s]: Â of the trajectory's episode."""
    weight: Float64
    """float64[s]: factor of ℓ_τ in the loss (``reduction``). Those of an episode have a fixed sum over all micro-steps:
    1, or its target tokens."""
    episode_index: Int32
    """int32[s]: index of the trajectory's episode in ``episodes``."""
    episodes: tuple[str, ...]
    kinds: tuple[str, ...]
    """Kind of each of the s trajectories."""

    def __post_init__(self) -> None:
        n, s = len(self.ids), len(self.kinds)
        if not s:
            raise MicroStepError("a micro-step has at least one trajectory")
        expected = {name: (dtype, n) for name, dtype in _PER_TOKEN.items()}
        expected |= {name: (dtype, s) for name, dtype in _PER_TRAJECTORY.items()}
        expected["cu_seqlens"] = (np.int32, s + 1)
        for name, (dtype, length) in expected.items():
            column = getattr(self, name)
            if column.dtype != dtype or column.shape != (length,):
                raise MicroStepError(
                    f"{name} is {column.dtype}{list(column.shape)}, not {np.dtype(dtype).name}[{length}]"
                )
        starts, lengths = self.cu_seqlens[:-1], np.diff(self.cu_seqlens)
        if self.cu_seqlens[0] != 0 or self.cu_seqlens[-1] != n or (lengths < 1).any():
            raise MicroStepError(f"cu_seqlens does not cut {n} tokens into runs of one or more")
        self._check_prefixes(lengths)
        if self.target[starts[self.prefix_len == 0]].any():
            raise MicroStepError("the first token of a trajectory is a target, but nothing predicts it")
        if not self.target[self.cu_seqlens[1:] - 1].all():
            raise MicroStepError("a trajectory does not end with a target")
        if not ((self.episode_index >= 0) & (self.episode_index < len(self.episodes))).all():
            raise MicroStepError(f"episode_index points outside the {len(self.episodes)} episodes")

    def _check_prefixes(self, lengths: Int32) -> None:
        order, alone = np.arange(len(lengths)), self.prefix_of == -1
        if not ((self.prefix_of >= -1) & (self.prefix_of < order)).all():
            raise MicroStepError("a trajectory begins with one that isn't before it")
        whole = self.prefix_len + lengths
        if not (alone == (self.prefix_len == 0)).all() or (self.prefix_len < 0).any():
            raise MicroStepError("prefix_len must be positive exactly where there is a prefix")
        if (self.prefix_len > np.where(alone, 0, whole[self.prefix_of])).any():
            raise MicroStepError("a prefix is longer than the trajectory that it is taken from")
        if (whole < 2).any():
            raise MicroStepError("a trajectory has two tokens or more")

    @property
    def tokens(self) -> int:
        """n, the tokens of the forward pass where shared prefixes are computed once."""
        return len(self.ids)

    @property
    def lengths(self) -> Int32:
        """int32[s]: tokens of each trajectory, shared ones included."""
        whole: Int32 = self.prefix_len + np.diff(self.cu_seqlens)
        return whole

    def path(self, trajectory: int) -> Index:
        """intp[length]: where the tokens of a trajectory are among the n, in order."""
        runs = []
        stop = int(self.lengths[trajectory])
        while stop:
            shared = int(self.prefix_len[trajectory])
            first = int(self.cu_seqlens[trajectory])
            if stop > shared:
                runs.append(np.arange(first, first + stop - shared, dtype=np.intp))
                stop = shared
            trajectory = int(self.prefix_of[trajectory])
        return np.concatenate(runs[::-1])

    def unshared(self) -> MicroStep:
        """The same trajectories, each written out from its first token: the same loss by more computation."""
        paths = [self.path(trajectory) for trajectory in range(len(self.kinds))]
        where = np.concatenate(paths)
        target = np.concatenate(
            [self.target[path] & (path >= first) for path, first in zip(paths, self.cu_seqlens[:-1], strict=True)]
        )
        sampled: dict[str, Any] = {name: getattr(self, name)[where] for name in SAMPLED}
        for name, (_, fill) in SAMPLED.items():
            sampled[name][~target] = fill
        return replace(
            self,
            ids=self.ids[where],
            cu_seqlens=np.cumsum([0, *map(len, paths)], dtype=np.int32),
            prefix_of=np.full(len(paths), -1, np.int32),
            prefix_len=np.zeros(len(paths), np.int32),
            target=target,
            **sampled,
        )

    @property
    def targets(self) -> int:
        """Number of target tokens."""
        return int(self.target.sum())

    def to_bytes(self) -> bytes:
        """A safetensors file; equal micro-steps give equal bytes."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("episodes", "kinds")}
        return write_columns(columns, _METADATA, {"episodes": self.episodes, "kinds": self.kinds})

    @classmethod
    def from_bytes(cls, data: bytes) -> MicroStep:
        """The inverse of ``to_bytes``. Raises MicroStepError on anything else."""
        try:
            columns, names = read_columns(data, _METADATA)
            return cls(**columns, episodes=tuple(names["episodes"]), kinds=tuple(names["kinds"]))
        except UNREADABLE as error:
            raise MicroStepError(f"not a micro-step: {error}") from error
