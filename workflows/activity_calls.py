"""Every activity that a workflow calls: its queue, deadlines and retries, in one place.

Workflows call these functions and never name an activity themselves. An activity is at-least-once; each is
idempotent, or fenced by the incarnation that it names. What is awaited for long is a handle, to be abandoned.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Final, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError

from workflows import names
from workflows.contracts.configuration import RunConfig
from workflows.contracts.orders import (
    Candidate,
    CellOrder,
    CellReport,
    CommitInput,
    Committed,
    DrainInput,
    DrainResult,
    FinishInput,
    GradientsInput,
    GradientSum,
    ReachCellInput,
    ReplicaOrder,
    TrainInput,
    TrainResult,
    WatchCellInput,
)
from workflows.contracts.results import (
    EpisodeExit,
    EpisodeInput,
    GradeInput,
    GroupResult,
    ProcessInput,
    RunFacts,
    StepInput,
    Verdict,
)
from workflows.scheduling.pool_view import Decision, PoolView

Result = TypeVar("Result")

LOST = "Lost"
"""Application error type: the incarnation that the order was for is gone. Never retried."""
SUMS_LOST = "SumsLost"
"""Application error type: gradient sums of other incarnations, its details, could not be read. Never retried."""
SILENT = "Silent"
"""Error type: a part of the cell answers nothing. Never retried: the cell is reached first."""

SECOND = timedelta(seconds=1)
DAY_S: Final = 24 * 3600
QUICK = RetryPolicy(initial_interval=0.5 * SECOND, maximum_interval=10 * SECOND, maximum_attempts=8)
STEADY = RetryPolicy(initial_interval=SECOND, backoff_coefficient=2, maximum_interval=30 * SECOND)
FENCED = RetryPolicy(
    initial_interval=SECOND,
    maximum_interval=5 * SECOND,
    maximum_attempts=4,
    non_retryable_error_types=[LOST, SUMS_LOST, SILENT],
)
"""For orders to one incarnation: repeated while its worker restarts, never once the incarnation is gone."""
EPISODE = RetryPolicy(
    initial_interval=2 * SECOND,
    maximum_interval=60 * SECOND,
    maximum_attempts=4,
    non_retryable_error_types=["TaskInvalid", "HarnessUnavailable"],
)
GRADE = RetryPolicy(
    initial_interval=SECOND, maximum_attempts=4, non_retryable_error_types=["EvaluatorFailed", "TaskInvalid"]
)


def _start(
    activity: str,
    result: type[Result],
    *arguments: object,
    within_s: float,
    queue: str = names.CONTROL_QUEUE,
    beats_s: float | None = None,
    retry: RetryPolicy = STEADY,
    **options: Any,
) -> workflow.ActivityHandle[Result]:
    """An attempt may take ``within_s`` seconds, and be silent for ``beats_s`` (None: it doesn't heartbeat)."""
    handle: workflow.ActivityHandle[Result] = workflow.start_activity(
        activity,
        args=arguments,
        result_type=result,
        task_queue=queue,
        start_to_close_timeout=within_s * SECOND,
        heartbeat_timeout=beats_s * SECOND if beats_s else None,
        retry_policy=retry,
        **options,
    )
    return handle


async def _order(
    activity: str, result: type[Result], order: CellOrder | ReplicaOrder, lost_s: float, *, minutes: int, summary: str
) -> Result:
    """Fails when no worker of the cell takes the order within ``lost_s`` seconds."""
    return await _start(
        activity,
        result,
        order,
        queue=names.cell_queue(order.cell),
        schedule_to_start_timeout=lost_s * SECOND,
        within_s=minutes * 60,
        beats_s=20,
        retry=FENCED,
        summary=summary,
    )


def abandon(watch: asyncio.Task[Any]) -> None:
    """Cancel an activity whose answer nobody waits for any more."""
    watch.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    watch.cancel()


# --- runs and steps ------------------------------------------------------------------------------------------------


async def inspect_run(config: RunConfig) -> RunFacts:
    return await _start("inspect_run", RunFacts, config, within_s=600, retry=QUICK, summary=f"validate {config.name}")


async def open_step(step: StepInput) -> list[int] | None:
    """The order in which its groups start; None from a worker that knows none."""
    summary = f"demand of {len(step.tasks)} × {step.group_size} episodes"
    return await _start("open_step", list[int], step, within_s=30, summary=summary)


async def await_turn(run: str, step: int) -> None:
    """Until every episode of the run's earlier steps has started: a later step's episodes are filler."""
    summary = "wait until the earlier steps' episodes have started"
    await _start("await_turn", type(None), run, step, within_s=DAY_S, beats_s=20, summary=summary)


async def close_step(run: str, step: int) -> None:
    await _start("close_step", type(None), run, step, within_s=30)


async def commit_candidate(commit: CommitInput) -> Committed | None:
    """None from a worker that knows no gauges."""
    summary = f"LATEST = version {commit.version}"
    return await _start("commit_candidate", Committed, commit, within_s=300, summary=summary)


async def describe_steps(run: str, steps: list[int]) -> dict[str, str]:
    """Execution status of each step's workflow; the reconciliation behind the completion signals."""
    return await _start("describe_steps", dict[str, str], run, steps, within_s=30, retry=QUICK)


async def run_status(run: str) -> str:
    """Execution status of a run's workflow; MISSING when there is none."""
    return await _start("run_status", str, run, within_s=30, retry=QUICK)


def watch_demand(view: PoolView) -> workflow.ActivityHandle[Decision]:
    """Returns when the policy would decide something else than what ``view`` already holds."""
    summary = "watch the counts of queued and running episodes"
    return _start("watch_demand", Decision, view, within_s=DAY_S, beats_s=20, summary=summary)


# --- episodes and groups -------------------------------------------------------------------------------------------


async def run_episode(episode: EpisodeInput, summary: str) -> EpisodeExit:
    """Heartbeats for hours; a worker that restarts on the same host goes on with the same attempt.

    The heartbeat may be shorter than an outage of the server: an attempt that is dispatched again adopts the harness
    that runs.
    """
    return await _start(
        "run_episode",
        EpisodeExit,
        episode,
        queue=names.HARNESS_QUEUE,
        activity_id=f"ep-{episode.index:02d}",
        within_s=episode.budget.wall_s + 900,
        beats_s=30,
        cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        retry=EPISODE,
        summary=summary,
    )


async def grade_episode(grade: GradeInput) -> Verdict:
    return await _start(
        "grade_episode",
        Verdict,
        grade,
        queue=names.GRADE_QUEUE,
        activity_id=f"grade-{grade.episode.rsplit('/', 1)[1]}",
        within_s=3600,
        beats_s=30,
        retry=GRADE,
    )


async def process_group(process: ProcessInput) -> GroupResult:
    summary = f"group {process.group}: {process.task}"
    queue = names.TRAJECTORY_QUEUE
    return await _start("process_group", GroupResult, process, queue=queue, within_s=900, beats_s=60, summary=summary)


# --- cells ---------------------------------------------------------------------------------------------------------


def drain_cell(drain: DrainInput) -> workflow.ActivityHandle[DrainResult]:
    """Returns when no call runs on the cell. On the control queue: the cell that is drained may be dead."""
    within_s = drain.drain_s + drain.deadline_s + 30
    return _start("drain_cell", DrainResult, drain, within_s=within_s, beats_s=20, summary=f"drain {drain.cell}")


async def serve_rollout(order: CellOrder) -> CellReport:
    summary = f"{order.cell} serves version {order.desired.version}"
    return await _order("serve_rollout", CellReport, order, order.desired.lost_s, minutes=20, summary=summary)


async def prepare_training(order: CellOrder) -> CellReport:
    what = "core" if order.desired.core else "satellite"
    summary = f"{order.cell} becomes {what} of step {order.desired.step}"
    return await _order("prepare_training", CellReport, order, order.desired.lost_s, minutes=20, summary=summary)


def watch_cell(watch: WatchCellInput, lost_s: float) -> workflow.ActivityHandle[CellReport]:
    """Returns when the cell's engine or replica is another incarnation than the one given, or is silent.

    Fails as soon as its worker falls silent, and when none takes it within ``lost_s`` seconds.
    """
    return _start(
        "watch_cell",
        CellReport,
        watch,
        queue=names.cell_queue(watch.cell),
        schedule_to_start_timeout=lost_s * SECOND,
        within_s=DAY_S,
        beats_s=20,
        retry=RetryPolicy(maximum_attempts=1),
        summary=f"watch the processes of {watch.cell}",
    )


def reach_cell(reach: ReachCellInput, within_s: float | None) -> workflow.ActivityHandle[CellReport]:
    """Returns when every part of the cell answers, and fails when that takes longer than ``within_s`` seconds.

    None: it lies in the cell's queue until a worker takes it, and looks until all is there. That adds nothing to the
    history, however long it takes.
    """
    return _start(
        "reach_cell",
        CellReport,
        reach,
        queue=names.cell_queue(reach.cell),
        schedule_to_close_timeout=None if within_s is None else within_s * SECOND,
        within_s=DAY_S,
        beats_s=15,
        retry=RetryPolicy(initial_interval=SECOND, maximum_interval=5 * SECOND),
        summary=f"{'wait for' if within_s is None else 'reach'} {reach.cell}",
    )


# --- training ------------------------------------------------------------------------------------------------------


async def train_micro_steps(order: TrainInput, lost_s: float) -> TrainResult:
    summary = f"{len(order.micro_steps)} micro-steps on {order.cell}"
    return await _order("train_micro_steps", TrainResult, order, lost_s, minutes=30, summary=summary)


async def offer_gradients(order: GradientsInput, lost_s: float) -> GradientSum:
    summary = f"gradient sum of {order.cell}"
    return await _order("offer_gradients", GradientSum, order, lost_s, minutes=10, summary=summary)


async def finish_step(order: FinishInput, lost_s: float) -> Candidate:
    """Fails with `SUMS_LOST` when only sums of others are at fault."""
    summary = f"update: version {order.version} → {order.version + 1}"
    return await _order("finish_step", Candidate, order, lost_s, minutes=30, summary=summary)


def lost_sums(error: ActivityError) -> list[str]:
    """Incarnations whose gradient sums could not be read, when that is why `finish_step` failed."""
    cause = error.cause
    return list(cause.details) if isinstance(cause, ApplicationError) and cause.type == SUMS_LOST else []
