"""Names that Temporal, its UI and other programs see: fixed, in one place."""

from __future__ import annotations

CONTROL_QUEUE = "gyre.control"
HARNESS_QUEUE = "gyre.harness"
GRADE_QUEUE = "gyre.grade"
TRAJECTORY_QUEUE = "gyre.trajectory"

SEARCH_ATTRIBUTES = {
    "GyreRun": "Keyword",
    "GyreStep": "Int",
    "GyrePhase": "Keyword",
    "GyreOutcome": "Keyword",
    "GyreReward": "Double",
}
"""Search attribute -> Temporal type; registered by `gyre up`, checked by `gyre doctor`."""


def cell_queue(cell: str) -> str:
    return f"gyre.cell.{cell}"


def run_id(run: str) -> str:
    return f"gyre/{run}"


def step_id(run: str, step: int) -> str:
    return f"gyre/{run}/step/{step:06d}"


def group_id(run: str, step: int, group: int) -> str:
    return f"{step_id(run, step)}/g/{group:03d}"


def scheduler_id(pool: str) -> str:
    return f"gyre/scheduler/{pool}"


def cell_id(cell: str) -> str:
    return f"gyre/cell/{cell}"


def episode_name(run: str, step: int, group: int, index: int) -> str:
    """The one name of an episode everywhere: Redis, blob store, folders, command line."""
    return f"{run}/{step:06d}/{group:03d}/{index:02d}"
