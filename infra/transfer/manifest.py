"""What a source offers: where its bytes are, what they are, and how to tell that they arrived whole.

Invariant: a manifest describes one content. The digests say what the bytes must be, so whatever has happened to the
memory since, a reader either gets that content or notices. Importing this module doesn't import torch.

It knows layout and digests. It doesn't know how bytes are moved, nor what the tensors mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from torch import Tensor

DTYPES: Final = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""The torch dtypes that can be moved, with their bytes per element."""

digest: Final = xxhash.xxh3_128_hexdigest
"""xxh3-128 (hex) of a bytes-like object."""


class TensorEntry(BaseModel):
    """One tensor inside the published bytes, contiguous in row-major order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: str
    """A name of ``DTYPES``."""
    shape: tuple[int, ...]
    offset: int = Field(ge=0)
    """Bytes from the manifest's ``address``; a multiple of 64."""
    nbytes: int = Field(ge=0)


class TransferManifest(BaseModel):
    """One publication of named tensors by one process. Raises ValidationError when its parts contradict each other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    source: str = Field(pattern="^[0-9a-f]{32}$")
    """Boot id of the publisher: another process, or a restarted one, has another."""
    epoch: int = Field(ge=1)
    """Counts the publisher's publications. (source, epoch) is written in the memory itself, before the data."""
    session: str
    """``host:port`` of the source's transfer engine."""
    address: int = Field(gt=0)
    """Of the first data byte, in the source's address space."""
    nbytes: int = Field(ge=0)
    chunk_bytes: int = Field(gt=0)
    digests: tuple[str, ...]
    """xxh3-128 (hex) of each chunk of ``chunk_bytes``; the last one may be shorter."""
    tensors: tuple[TensorEntry, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.digests) != -(-self.nbytes // self.chunk_bytes):
            raise ValueError(f"{self.nbytes} bytes in chunks of {self.chunk_bytes} have {len(self.digests)} digests")
        for entry in self.tensors:
            if entry.dtype not in DTYPES:
                raise ValueError(f"tensor {entry.name!r} has unknown dtype {entry.dtype!r}")
            if min(entry.shape, default=0) < 0 or math.prod(entry.shape) * DTYPES[entry.dtype] != entry.nbytes:
                raise ValueError(f"tensor {entry.name!r}: {entry.dtype}{list(entry.shape)} isn't {entry.nbytes} bytes")
            if entry.offset % 64 or entry.offset + entry.nbytes > self.nbytes:
                raise ValueError(f"tensor {entry.name!r} doesn't lie within the {self.nbytes} bytes")
        if len({entry.name for entry in self.tensors}) < len(self.tensors):
            raise ValueError("two tensors have the same name")
        return self

    @property
    def checksum(self) -> str:
        """xxh3-128 (hex) of the whole manifest: equal for equal manifests only."""
        return digest(self.model_dump_json().encode())

    def chunk(self, index: int) -> tuple[int, int]:
        """(offset, length) in bytes of a chunk."""
        offset = index * self.chunk_bytes
        return offset, min(self.chunk_bytes, self.nbytes - offset)


def dtype_name(tensor: Tensor) -> str:
    """The tensor's dtype as manifests spell it. Raises TypeError for one that can't be moved."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"tensors of {tensor.dtype} can't be transferred")
    return name


def tensor_bytes(tensor: Tensor) -> Tensor:
    """The tensor's values as uint8[nbytes], row-major; shares memory where the tensor is contiguous."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """xxh3-128 (hex) of named tensors: name, dtype, shape and bytes of each, in the order of the names.

    Two replicas hold equal weights if and only if their checksums are equal. ``-0.0`` and ``0.0`` differ, as do NaNs
    of different bits. Raises TypeError for a dtype that can't be transferred.
    """
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(json.dumps([name, dtype_name(tensor), list(tensor.shape)]).encode())
        state.update(tensor_bytes(tensor).cpu().numpy())
    return state.hexdigest()
