"""The micro-step: a pack of whole trajectories, the unit of one forward and backward pass.

Invariant: equal micro-steps have equal bytes, whoever made them and in which order, so a micro-step's content
hash names it. It carries all that its loss needs, and where each target token was sampled. It does not know the
run, the step or N.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trajectory.records import Float32, Int32
from trajectory.tree import Bool

Float64 = npt.NDArray[np.float64]

_METADATA: Final = "gyre.micro_step"
_PER_TOKEN: Final = {
    "ids": np.int32,
    "target": np.bool_,
    "behaviour": np.float32,
    "temperature": np.float32,
    "version": np.int32,
    "call": np.int32,
    "offset": np.int32,
}
_PER_TRAJECTORY: Final = {"advantage": np.float64, "weight": np.float64, "episode_index": np.int32}


class MicroStepError(ValueError):
    """Columns or bytes that are no micro-step."""


@dataclass(frozen=True, eq=False)
class MicroStep:
    """s trajectories of n tokens in all, one after the other. Raises MicroStepError when columns do not fit.

    Compare two by their bytes.
    """

    ids: Int32
    """int32[n]: token ids."""
    cu_seqlens: Int32
    """int32[s+1]: trajectory i is tokens [cu_seqlens[i], cu_seqlens[i+1])."""
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
    """float64[s]: factor of ℓ_τ in the loss. Those of an episode sum to 1 over all micro-steps."""
    episode_index: Int32
    """int32[s]: index of the trajectory's episode in ``episodes``."""
    episodes: tuple[str, ...]
    kinds: tuple[str, ...]
    """Kind of each of the s trajectories."""

    def __post_init__(self) -> None:
        n, s = len(self.ids), len(self.kinds)
        if not s:
            raise MicroStepError("a micro-step has at least one trajectory")
        expected: dict[str, tuple[Any, int]] = {name: (dtype, n) for name, dtype in _PER_TOKEN.items()}
        expected |= {name: (dtype, s) for name, dtype in _PER_TRAJECTORY.items()}
        expected["cu_seqlens"] = (np.int32, s + 1)
        for name, (dtype, length) in expected.items():
            column = getattr(self, name)
            if column.dtype != dtype or column.shape != (length,):
                raise MicroStepError(
                    f"{name} is {column.dtype}{list(column.shape)}, not {np.dtype(dtype).name}[{length}]"
                )
        starts, lengths = self.cu_seqlens[:-1], np.diff(self.cu_seqlens)
        if self.cu_seqlens[0] != 0 or self.cu_seqlens[-1] != n or (lengths < 2).any():
            raise MicroStepError(f"cu_seqlens does not cut {n} tokens into trajectories of two or more")
        if self.target[starts].any():
            raise MicroStepError("the first token of a trajectory is a target, but nothing predicts it")
        if not self.target[self.cu_seqlens[1:] - 1].all():
            raise MicroStepError("a trajectory does not end with a target")
        if not ((self.episode_index >= 0) & (self.episode_index < len(self.episodes))).all():
            raise MicroStepError(f"episode_index points outside the {len(self.episodes)} episodes")

    @property
    def tokens(self) -> int:
        """n, the tokens of the forward pass."""
        return len(self.ids)

    @property
    def targets(self) -> int:
        """Number of target tokens."""
        return int(self.target.sum())

    def to_bytes(self) -> bytes:
        """A safetensors file; equal micro-steps give equal bytes."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("episodes", "kinds")}
        # one metadata entry: safetensors writes several in the order of a randomised hash map
        names = json.dumps({"episodes": self.episodes, "kinds": self.kinds}, sort_keys=True)
        data: bytes = save({k: np.ascontiguousarray(v) for k, v in columns.items()}, metadata={_METADATA: names})
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> MicroStep:
        """The inverse of ``to_bytes``. Raises MicroStepError on anything else."""
        try:
            columns = load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            names = json.loads(header["__metadata__"][_METADATA])
            return cls(**columns, episodes=tuple(names["episodes"]), kinds=tuple(names["kinds"]))
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise MicroStepError(f"not a micro-step: {error}") from error
