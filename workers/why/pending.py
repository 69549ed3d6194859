"""The wait behind a pending activity: for a worker, for its next attempt, or for what it does.

Pure. The deadline of an attempt that runs is its start-to-close timeout; of one whose heartbeats stay away, the
heartbeat timeout.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from workers.why.temporal import Pending, QueueWorkers, Task
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
    does = DOES.get(pending.activity, f"{pending.activity} runs")
    about = {"what": what, "owner": owner_of(pending), "kind": kind}
    if pending.state == "scheduled":
        return _scheduled(about, pending, queues.get(pending.queue), now)
    since = pending.started or pending.scheduled
    if pending.state == "cancelling":
        ends = "the attempt is given up"
        return Wait(**about, reason="it is being cancelled", since=since, deadline=_beat(pending), ends=ends)
    detail = f"attempt {pending.attempt}, after {pending.failure}" if pending.failure else ""
    beat = _beat(pending)
    if beat is not None and (beat - now).total_seconds() < pending.heartbeat_s / 2:
        silent = f"{does}, but its worker gives no sign of life"
        return Wait(**about, reason=silent, detail=detail, since=since, deadline=beat, ends=_given_up(pending, "lost"))
    end, ends = _end(pending), _given_up(pending, "failed")
    if pending.expires is not None and (end is None or pending.expires < end):
        end, ends = pending.expires, "it fails for good"
    return Wait(**about, reason=does, detail=detail, since=since, deadline=end, ends=ends)


def _scheduled(about: dict[str, str], pending: Pending, workers: QueueWorkers | None, now: datetime) -> Wait:
    if pending.again is not None and pending.again > now:
        reason = f"attempt {pending.attempt - 1} of {pending.activity} failed: {pending.failure}"
        ends = f"attempt {pending.attempt} begins"
        return Wait(**about, reason=reason, since=pending.scheduled, deadline=pending.again, ends=ends)
    since = pending.again or pending.scheduled
    detail = f"attempt {pending.attempt}, after {pending.failure}" if pending.failure else ""
    if workers is not None and not workers.there:
        reason = f"nobody works on {pending.queue}: {workers.words}"
        ends = "a worker of that queue is started (`gyre up` starts them all)"
    else:
        reason, ends = f"all workers of {pending.queue} are busy", "one of them is free"
    deadline = pending.expires
    if pending.schedule_to_start_s and since is not None:
        deadline, ends = since + timedelta(seconds=pending.schedule_to_start_s), "the order fails, and is given anew"
    return Wait(**about, reason=reason, detail=detail, since=since, deadline=deadline, ends=ends)


def task_waits(what: str, workflow: str, task: Task | None, workers: QueueWorkers, now: datetime) -> list[Wait]:
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
        deadline = task.since + timedelta(seconds=TASK_TIMEOUT_S) if task.since is not None else None
    else:
        reason = f"nobody runs its code: {workers.words}"
        ends = "a worker of that queue takes it (`gyre up` starts them all)"
    owner = f"{workflow} · {workers.queue}"
    return [Wait(what=what, owner=owner, reason=reason, since=task.since, deadline=deadline, ends=ends)]


def _given_up(pending: Pending, how: str) -> str:
    return f"the attempt counts as {how}" + ("" if pending.last else " and is repeated")


def _end(pending: Pending) -> datetime | None:
    if pending.started is None or not pending.start_to_close_s:
        return None
    return pending.started + timedelta(seconds=pending.start_to_close_s)


def _beat(pending: Pending) -> datetime | None:
    last = pending.heartbeat or pending.started
    if last is None or not pending.heartbeat_s:
        return None
    return last + timedelta(seconds=pending.heartbeat_s)
