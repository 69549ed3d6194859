"""Cells that are lost and pools that change their size, as words of the command line: `1@600:120`, `5@3600`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import ValidationError

from workers.errors import UsageError
from workflows.simulation.workload import Absence, PoolModel


def with_absences(pool: PoolModel, lose: Sequence[str], resize: Sequence[str]) -> PoolModel:
    """``pool`` with its cells' losses and sizes over time. Its ``cells`` are then the most that it ever has.

    Raises UsageError for words that don't say when, and for a cell that is never there.
    """
    sizes = [(0.0, pool.cells), *sorted(_size(words) for words in resize)]
    most = max(size for _, size in sizes)
    absences = [absence for cell in range(most) for absence in _outside(cell, sizes)]
    for words in lose:
        absence = _loss(words)
        if absence.cell >= most:
            raise UsageError(f"--lose {words}: there are cells 0 to {most - 1}")
        absences.append(absence)
    return pool.model_copy(update={"cells": most, "absences": absences})


def _outside(cell: int, sizes: Sequence[tuple[float, int]]) -> list[Absence]:
    """When the pool is too small to have the cell."""
    absences, since = [], None
    for at, size in [*sizes, (math.inf, cell + 1)]:
        if cell >= size and since is None:
            since = at
        elif cell < size and since is not None:
            absences.append(Absence(cell=cell, at_s=since, for_s=at - since, asked=True))
            since = None
    return absences


def _size(words: str) -> tuple[float, int]:
    cells, _, at_s = words.partition("@")
    try:
        at, size = float(at_s), int(cells)
    except ValueError:
        raise UsageError(f"--resize {words}: write CELLS@SECONDS, as 5@3600") from None
    if at <= 0 or size < 1:
        raise UsageError(f"--resize {words}: at least one cell, at a time after the start")
    return at, size


def _loss(words: str) -> Absence:
    cell, _, when = words.partition("@")
    at, _, seconds = when.partition(":")
    try:
        return Absence(cell=int(cell), at_s=float(at), for_s=float(seconds or "inf"))
    except ValidationError:
        raise UsageError(f"--lose {words}: cells and seconds are not negative") from None
    except ValueError:
        raise UsageError(f"--lose {words}: write CELL@SECONDS or CELL@SECONDS:SECONDS, as 1@600:120") from None
