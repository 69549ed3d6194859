"""The wait behind a pending activity: for a worker, for its next attempt, or for what it does.

Pure. The deadline of an attempt that runs is its start-to-close timeout; of one whose heartbeats stay away, the
heartbeat timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from workers.why.temporal import Pending, QueueWorkers, WorkflowTask
from workers.why.wait import Wait

DOES: Final = {
    "inspect_run": "its configuration is checked and version 0 is stored",
    "open_step": "its episodes are counted in",
    "await_turn": "episodes of an older step have not started yet, and its own are filler",
    "close_step": "its counts are put away",
    "describe_steps": "its open steps are looked at",
    "run_episode": "its harness runs",
    "grade_episode": "its evaluator runs",
    "process_group": "its trajectories are made into micro-steps",
    "watch_demand": "the counts of episodes are followed until the policy decides otherwise",
    "drain_cell": "calls that run on the cell end or move to another",
    "serve_rollout": "the weights are brought into the engine",
    "prepare_training": "the replica takes the step's version",
    "watch_cell": "its processes are watched",
    "reach_cell": "all its parts are asked until they answer",
    "train_micro_steps": "a claim of micro-steps is trained",
    "offer_gradients": "a satellite offers its gradient sum",
    "finish_step": "the core adds the gradient sums and makes the update",
    "commit_candidate": "the step's result and LATEST are written",
}
"""What is waited for while an activity runs."""

TASK_S: Final = 3.0
"""A workflow task that is younger than this is none to tell of: workflows are run all the time."""
TASK_TIMEOUT_S: Final = 10.0
"""A worker must answer a workflow task in this time: Temporal's default, which gyre keeps."""

Queues = Mapping[str, QueueWorkers]


def owner_of(pending: Pending) -> str:
    name = pending.activity if pending.id.isdigit() else f"{pending.activity} {pending.id}"
    where = f"{pending.queue}, {pending.worker}" if pending.worker and pending.state != "scheduled" else pending.queue
    return f"{pending.workflow} · {name} on {where}"


def activity_wait(what: str, pending: Pending, queues: Queues, now: datetime, kind: str = "") -> Wait:
    """The wait of ``what`` for an activity."""
    wait = partial(Wait, what, owner_of(pending), kind=kind)
    detail = f"attempt {pending.attempt}, after {pending.failure}" if pending.failure else ""
    if pending.state == "scheduled":
        return _scheduled(wait, detail, pending, queues.get(pending.queue), now)
    since, beat = pending.started or pending.scheduled, _beat(pending)
    if pending.state == "cancelling":
        return wait("it is being cancelled", since=since, deadline=beat, ends="the attempt is given up")
    does = DOES.get(pending.activity, f"{pending.activity} runs")
    repeated = "" if pending.last else " and is repeated"
    if beat is not None and (beat - now).total_seconds() < pending.heartbeat_s / 2:
        silent = f"{does}, but its worker gives no sign of life"
        return wait(silent, detail=detail, since=since, deadline=beat, ends=f"the attempt counts as lost{repeated}")
    end, ends = _after(pending.started, pending.start_to_close_s), f"the attempt counts as failed{repeated}"
    if pending.expires is not None and (end is None or pending.expires < end):
        end, ends = pending.expires, "it fails for good"
    return wait(does, detail=detail, since=since, deadline=end, ends=ends)


def _scheduled(
    wait: Callable[..., Wait], detail: str, pending: Pending, workers: QueueWorkers | None, now: datetime
) -> Wait:
    if pending.again is not None and pending.again > now:
        reason = f"attempt {pending.attempt - 1} of {pending.activity} failed: {pending.failure}"
        return wait(reason, since=pending.scheduled, deadline=pending.again, ends=f"attempt {pending.attempt} begins")
    since, deadline = pending.again or pending.scheduled, pending.expires
    if workers is not None and not workers.there:
        reason = f"nobody works on {pending.queue}: {workers.words}"
        ends = "a worker of that queue is started (`gyre up` starts them all)"
    else:
        reason, ends = f"all workers of {pending.queue} are busy", "one of them is free"
    if (ordered_until := _after(since, pending.schedule_to_start_s)) is not None:
        deadline, ends = ordered_until, "the order fails, and is given anew"
    return wait(reason, detail=detail, since=since, deadline=deadline, ends=ends)


def task_waits(what: str, workflow: str, task: WorkflowTask | None, workers: QueueWorkers, now: datetime) -> list[Wait]:
    """The wait of a workflow whose own code no worker has run for a while, or fails in one; mostly none."""
    if task is None:
        return []
    waited = (now - task.since).total_seconds() if task.since is not None else TASK_S
    if task.attempt == 1 and waited < TASK_S:
        return []
    deadline = None
    if task.attempt > 1:
        reason = f"its workflow task has failed {task.attempt - 1} times: the log of the worker says why"
        ends = "it is repeated, ever less often, until the worker's code or the workflow is mended"
    elif task.started:
        reason, ends = f"a worker that doesn't answer has its code: {workers.words}", "another worker is asked"
        deadline = _after(task.since, TASK_TIMEOUT_S)
    else:
        reason = f"nobody runs its code: {workers.words}"
        ends = "a worker of that queue takes it (`gyre up` starts them all)"
    return [Wait(what, f"{workflow} · {workers.queue}", reason, since=task.since, deadline=deadline, ends=ends)]


def _beat(pending: Pending) -> datetime | None:
    return _after(pending.heartbeat or pending.started, pending.heartbeat_s)


def _after(at: datetime | None, seconds: float) -> datetime | None:
    """None when the beginning isn't known, or there is no limit (0)."""
    return at + timedelta(seconds=seconds) if at is not None and seconds else None
