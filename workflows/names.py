"""Names that Temporal, its UI and other programs see: fixed, in one place."""

from __future__ import annotations

from temporalio.common import SearchAttributeKey

CONTROL_QUEUE = "gyre.control"
HARNESS_QUEUE = "gyre.harness"
GRADE_QUEUE = "gyre.grade"
TRAJECTORY_QUEUE = "gyre.trajectory"

GYRE_RUN = SearchAttributeKey.for_keyword("GyreRun")
GYRE_STEP = SearchAttributeKey.for_int("GyreStep")
GYRE_PHASE = SearchAttributeKey.for_keyword("GyrePhase")
GYRE_OUTCOME = SearchAttributeKey.for_keyword("GyreOutcome")
GYRE_REWARD = SearchAttributeKey.for_float("GyreReward")

SEARCH_ATTRIBUTES = {
    GYRE_RUN.name: "Keyword",
    GYRE_STEP.name: "Int",
    GYRE_PHASE.name: "Keyword",
    GYRE_OUTCOME.name: "Keyword",
    GYRE_REWARD.name: "Double",
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
