"""Every activity that a workflow calls: its queue, deadlines and retries, in one place.

Workflows call these functions and never name an activity themselves. An activity is at-least-once; each is
idempotent, or fenced by the incarnation that it names.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, TypeVar, Unpack

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
from workflows.scheduling.policies import Decision, PoolView

Result = TypeVar("Result")

CellOrders = CellOrder | TrainInput | GradientsInput | FinishInput

LOST = "Lost"
"""Application error type: the incarnation that the order was for is gone. Never retried."""
SUMS_LOST = "SumsLost"
"""Application error type: gradient sums of other incarnations, its details, could not be read. Never retried."""
SILENT = "Silent"
"""Error type: a part of the cell answers nothing. Never retried: the cell is reached first."""

SECOND = timedelta(seconds=1)
QUICK = RetryPolicy(initial_interval=0.5 * SECOND, maximum_interval=10 * SECOND, maximum_attempts=8)
STEADY = RetryPolicy(initial_interval=SECOND, backoff_coefficient=2, maximum_interval=30 * SECOND)
FENCED = RetryPolicy(
    initial_interval=SECOND,
    maximum_interval=5 * SECOND,
    maximum_attempts=4,
    non_retryable_error_types=[LOST, SUMS_LOST, SILENT],
)
"""For orders to one incarnation: repeated while its worker restarts, never once the incarnation is gone."""


async def _call(
    activity: str, arguments: list[Any], result: type[Result], **options: Unpack[workflow.ActivityConfig]
) -> Result:
    answer: Result = await workflow.execute_activity(activity, args=arguments, result_type=result, **options)
    return answer


def abandon(watch: asyncio.Task[Any]) -> None:
    """Cancel an activity whose answer nobody waits for any more."""
    watch.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    watch.cancel()


async def inspect_run(config: RunConfig) -> RunFacts:
    return await _call(
        "inspect_run",
        [config],
        RunFacts,
        task_queue=names.CONTROL_QUEUE,
        start_to_close_timeout=600 * SECOND,
        retry_policy=QUICK,
        summary=f"validate {config.name}",
    )


async def open_step(step: StepInput) -> list[int] | None:
    """The order in which its groups start; None from a worker that knows none."""
    order: list[int] | None = await workflow.execute_activity(
        "open_step",
        step,
        result_type=list[int],
        task_queue=names.CONTROL_QUEUE,
        start_to_close_timeout=30 * SECOND,
        retry_policy=STEADY,
        summary=f"demand of {len(step.tasks)} × {step.group_size} episodes",
    )
    return order


async def await_turn(run: str, step: int) -> None:
    """Until every episode of the run's earlier steps has started: a later step's episodes are filler."""
    await workflow.execute_activity(
        "await_turn",
        args=[run, step],
        task_queue=names.CONTROL_QUEUE,
        start_to_close_timeout=24 * 3600 * SECOND,
        heartbeat_timeout=20 * SECOND,
        retry_policy=STEADY,
        summary="wait until the earlier steps' episodes have started",
    )


async def close_step(run: str, step: int) -> None:
    await workflow.execute_activity(
        "close_step",
        args=[run, step],
        task_queue=names.CONTROL_QUEUE,
        start_to_close_timeout=30 * SECOND,
        retry_policy=STEADY,
    )


async def describe_steps(run: str, steps: list[int]) -> dict[str, str]:
    """Execution status of each step's workflow; the reconciliation behind the completion signals."""
    return await _call(
        "describe_steps",
        [run, steps],
        dict[str, str],
        task_queue=names.CONTROL_QUEUE,
        start_to_close_timeout=30 * SECOND,
        retry_policy=QUICK,
    )


async def run_status(run: str) -> str:
    """Execution status of a run's workflow; MISSING when there is none."""
    return await _call(
        "run_status",
        [run],
        str,
        task_queue=names.CONTROL_QUEUE,
        start_to_close_timeout=30 * SECOND,
        retry_policy=QUICK,
    )


async def run_episode(episode: EpisodeInput, summary: str) -> EpisodeExit:
    """Heartbeats for hours; a worker that restarts on the same host goes on with the same attempt.

    The heartbeat may be shorter than an outage of the server: an attempt that is dispatched again adopts the harness
    that runs.
    """
    return await _call(
        "run_episode",
        [episode],
        EpisodeExit,
        task_queue=names.HARNESS_QUEUE,
        activity_id=f"ep-{episode.index:02d}",
        start_to_close_timeout=(episode.budget.wall_s + 900) * SECOND,
        heartbeat_timeout=30 * SECOND,
        cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        retry_policy=RetryPolicy(
            initial_interval=2 * SECOND,
            maximum_interval=60 * SECOND,
            maximum_attempts=4,
            non_retryable_error_types=["TaskInvalid", "HarnessUnavailable"],
        ),
        summary=summary,
    )


async def grade_episode(grade: GradeInput) -> Verdict:
    return await _call(
        "grade_episode",
        [grade],
        Verdict,
        task_queue=names.GRADE_QUEUE,
        activity_id=f"grade-{grade.episode.rsplit('/', 1)[1]}",
        start_to_close_timeout=3600 * SECOND,
        heartbeat_timeout=30 * SECOND,
        retry_policy=RetryPolicy(
            initial_interval=SECOND, maximum_attempts=4, non_retryable_error_types=["EvaluatorFailed", "TaskInvalid"]
        ),
    )


async def process_group(process: ProcessInput) -> GroupResult:
    return await _call(
        "process_group",
        [process],
        GroupResult,
        task_queue=names.TRAJECTORY_QUEUE,
        start_to_close_timeout=900 * SECOND,
        heartbeat_timeout=60 * SECOND,
        retry_policy=STEADY,
        summary=f"group {process.group}: {process.task}",
    )


def watch_demand(view: PoolView) -> workflow.ActivityHandle[Decision]:
    """Returns when the policy would decide something else than what ``view`` already holds."""
    return workflow.start_activity(
        "watch_demand",
        view,
        result_type=Decision,
        task_queue=names.CONTROL_QUEUE,
        start_to_close_timeout=24 * 3600 * SECOND,
        heartbeat_timeout=20 * SECOND,
        cancellation_type=workflow.ActivityCancellationType.TRY_CANCEL,
        retry_policy=STEADY,
        summary="watch the counts of queued and running episodes",
    )


def drain_cell(drain: DrainInput) -> workflow.ActivityHandle[DrainResult]:
    """Returns when no call runs on the cell. On the control queue: the cell that is drained may be dead."""
    return workflow.start_activity(
        "drain_cell",
        drain,
        result_type=DrainResult,
        task_queue=names.CONTROL_QUEUE,
        start_to_close_timeout=(drain.drain_s + drain.deadline_s + 30) * SECOND,
        heartbeat_timeout=20 * SECOND,
        cancellation_type=workflow.ActivityCancellationType.TRY_CANCEL,
        retry_policy=STEADY,
        summary=f"drain {drain.cell}",
    )


async def _order(
    activity: str, order: CellOrders, result: type[Result], *, lost_s: float, minutes: int, summary: str
) -> Result:
    """Fails when no worker of the cell takes the order within ``lost_s`` seconds."""
    return await _call(
        activity,
        [order],
        result,
        task_queue=names.cell_queue(order.cell),
        schedule_to_start_timeout=lost_s * SECOND,
        start_to_close_timeout=minutes * 60 * SECOND,
        heartbeat_timeout=20 * SECOND,
        retry_policy=FENCED,
        summary=summary,
    )


async def serve_rollout(order: CellOrder) -> CellReport:
    summary = f"{order.cell} serves version {order.desired.version}"
    return await _order("serve_rollout", order, CellReport, lost_s=order.desired.lost_s, minutes=20, summary=summary)


async def prepare_training(order: CellOrder) -> CellReport:
    what = "core" if order.desired.core else "satellite"
    summary = f"{order.cell} becomes {what} of step {order.desired.step}"
    return await _order("prepare_training", order, CellReport, lost_s=order.desired.lost_s, minutes=20, summary=summary)


def watch_cell(watch: WatchCellInput, lost_s: float) -> workflow.ActivityHandle[CellReport]:
    """Returns when the cell's engine or replica is another incarnation than the one given, or is silent.

    Fails as soon as its worker falls silent, and when none takes it within ``lost_s`` seconds.
    """
    return workflow.start_activity(
        "watch_cell",
        watch,
        result_type=CellReport,
        task_queue=names.cell_queue(watch.cell),
        schedule_to_start_timeout=lost_s * SECOND,
        start_to_close_timeout=24 * 3600 * SECOND,
        heartbeat_timeout=20 * SECOND,
        cancellation_type=workflow.ActivityCancellationType.TRY_CANCEL,
        retry_policy=RetryPolicy(maximum_attempts=1),
        summary=f"watch the processes of {watch.cell}",
    )


def reach_cell(reach: ReachCellInput, within_s: float | None) -> workflow.ActivityHandle[CellReport]:
    """Returns when every part of the cell answers, and fails when that takes longer than ``within_s`` seconds.

    None: it lies in the cell's queue until a worker takes it, and looks until all is there. That adds nothing to the
    history, however long it takes.
    """
    return workflow.start_activity(
        "reach_cell",
        reach,
        result_type=CellReport,
        task_queue=names.cell_queue(reach.cell),
        schedule_to_close_timeout=None if within_s is None else within_s * SECOND,
        start_to_close_timeout=24 * 3600 * SECOND,
        heartbeat_timeout=15 * SECOND,
        cancellation_type=workflow.ActivityCancellationType.TRY_CANCEL,
        retry_policy=RetryPolicy(initial_interval=SECOND, maximum_interval=5 * SECOND),
        summary=f"{'wait for' if within_s is None else 'reach'} {reach.cell}",
    )


async def train_micro_steps(order: TrainInput, lost_s: float) -> TrainResult:
    summary = f"{len(order.micro_steps)} micro-steps on {order.cell}"
    return await _order("train_micro_steps", order, TrainResult, lost_s=lost_s, minutes=30, summary=summary)


async def offer_gradients(order: GradientsInput, lost_s: float) -> GradientSum:
    summary = f"gradient sum of {order.cell}"
    return await _order("offer_gradients", order, GradientSum, lost_s=lost_s, minutes=10, summary=summary)


async def finish_step(order: FinishInput, lost_s: float) -> Candidate:
    """Fails with `SUMS_LOST` when only sums of others are at fault."""
    summary = f"update: version {order.version} → {order.version + 1}"
    return await _order("finish_step", order, Candidate, lost_s=lost_s, minutes=30, summary=summary)


def lost_sums(error: ActivityError) -> list[str]:
    """Incarnations whose gradient sums could not be read, when that is why `finish_step` failed."""
    cause = error.cause
    return list(cause.details) if isinstance(cause, ApplicationError) and cause.type == SUMS_LOST else []


async def commit_candidate(commit: CommitInput) -> Committed | None:
    """None from a worker that knows no gauges."""
    committed: Committed | None = await workflow.execute_activity(
        "commit_candidate",
        commit,
        result_type=Committed,
        task_queue=names.CONTROL_QUEUE,
        start_to_close_timeout=300 * SECOND,
        retry_policy=STEADY,
        summary=f"LATEST = version {commit.version}",
    )
    return committed
