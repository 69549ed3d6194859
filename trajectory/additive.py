"""Statistics that add up: of micro-steps to claims, of groups to steps, in any order and grouping.

Invariant: ``add`` is associative and commutative (sums of floats up to rounding) and the empty mapping is its zero.
A histogram is {bin: count} over fixed bins of |x|, so histograms of parts add up to the whole's. Keys are text, since
everything here is written as JSON. This does not know what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

BINS_PER_DECADE: Final = 16
LOWEST: Final = 1e-9
EDGES: Final = tuple(LOWEST * 10 ** (k / BINS_PER_DECADE) for k in range(10 * BINS_PER_DECADE + 1))
"""Upper edges of the bins of |x|: bin 0 is [0, 1e-9], bin k is (EDGES[k-1], EDGES[k]], the last is all above 10.
Neighbouring edges are 15 % apart, which is how exact a quantile is."""


def add(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers by sum, names that begin with ``max_`` by maximum, mappings name by name; a missing name is zero."""
    total: dict[str, Any] = dict(left)
    for name, value in right.items():
        if name not in total:
            total[name] = value
        elif isinstance(value, Mapping):
            total[name] = add(total[name], value)
        else:
            total[name] = max(total[name], value) if name.startswith("max_") else total[name] + value
    return total


def add_all(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for part in parts:
        total = add(total, part)
    return total


def quantile(histogram: Mapping[str, int], q: float) -> float | None:
    """The upper edge of the bin that holds the q-quantile (nearest rank): never below it, above it by 15 % at most from
    1e-9 on. None for an empty histogram, infinity beyond the last edge."""
    count = sum(histogram.values())
    if not count:
        return None
    rank = max(1, math.ceil(q * count))
    for k, n in sorted((int(k), n) for k, n in histogram.items()):
        rank -= n
        if rank <= 0:
            return EDGES[k] if k < len(EDGES) else math.inf
    raise ValueError(f"{q} is no quantile")
