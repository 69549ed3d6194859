"""Columns: what trees, micro-steps and sealed episodes are made of, and the file in which columns are kept.

Invariant: equal columns with equal facts have equal bytes, and no token is ever an object of Python's own. This does
not know what columns mean together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

Bool = npt.NDArray[np.bool_]
Int32 = npt.NDArray[np.int32]
Index = npt.NDArray[np.intp]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Columns = dict[str, npt.NDArray[Any]]

SAMPLED: Final[dict[str, tuple[type[np.generic], float]]] = {
    "behaviour": (np.float32, 0.0),
    "temperature": (np.float32, 1.0),
    "version": (np.int32, -1),
    "call": (np.int32, -1),
    "offset": (np.int32, -1),
}
"""What is known of a sampled token, each a column: its dtype, and the value where a token isn't one."""

UNREADABLE: Final = (SafetensorError, KeyError, TypeError, json.JSONDecodeError)
"""What reading bytes that are something else raises."""


def write_columns(columns: Mapping[str, npt.NDArray[Any]], name: str, facts: Mapping[str, Any]) -> bytes:
    """A safetensors file; its metadata has ``facts`` as JSON under ``name``."""
    # one metadata entry: safetensors writes several in the order of a randomised hash map
    metadata = {name: json.dumps(facts, sort_keys=True)}
    data: bytes = save({key: np.ascontiguousarray(column) for key, column in columns.items()}, metadata=metadata)
    return data


def read_columns(data: bytes, name: str) -> tuple[Columns, dict[str, Any]]:
    """The columns and facts of ``write_columns``. Raises one of ``UNREADABLE`` on anything else."""
    columns = load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return columns, json.loads(header["__metadata__"][name])
