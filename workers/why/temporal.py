"""What Temporal knows of a workflow, within bounds: each read has a deadline, and a worker that is away is an answer.

Descriptions come from the server and need no worker; queries need one. It knows nothing of what the waits mean.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.enums.v1 import PendingActivityState, PendingWorkflowTaskState, TaskQueueType
from temporalio.api.failure.v1 import Failure
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflow.v1 import PendingActivityInfo, PendingWorkflowTaskInfo
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowHistoryEventFilterType,
    WorkflowQueryFailedError,
)
from temporalio.service import RPCError, RPCStatusCode

from infra.episodes.processes import start_time
from infra.settings import Settings
from infra.temporal import connect
from workers.errors import UsageError

Result = TypeVar("Result")
State = Literal["scheduled", "started", "cancelling"]

ANSWER_S: Final = 5.0
"""Seconds in which the server must answer."""
QUERY_S: Final = 3.0
"""Seconds in which a worker must answer a query."""
AT_ONCE: Final = 32
"""Requests at once."""
POLLS_S: Final = 70.0
"""A worker that lives asks for work at least this often (a poll lasts a minute)."""

TIMED_OUT: Final = (RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED)


class Unanswered(RuntimeError):
    """A query that no worker answered. The message says what is known of it."""


@dataclass(frozen=True)
class Pending:
    """An activity that has been scheduled and isn't over. Times are UTC; 0 seconds stand for no limit."""

    workflow: str
    activity: str
    id: str
    queue: str
    state: State
    attempt: int = 1
    scheduled: datetime | None = None
    started: datetime | None = None
    """Of the attempt that runs."""
    heartbeat: datetime | None = None
    again: datetime | None = None
    """When the next attempt begins, after one that failed."""
    worker: str = ""
    failure: str = ""
    """Of the attempt before."""
    last: bool = False
    """No other attempt is made after this one."""
    expires: datetime | None = None
    """When it fails for good, whatever attempt runs; None for never."""
    schedule_to_start_s: float = 0.0
    start_to_close_s: float = 0.0
    heartbeat_s: float = 0.0


@dataclass(frozen=True)
class Task:
    """A workflow task that isn't done: the workflow's code waits for a worker, or fails in one."""

    attempt: int
    since: datetime | None
    started: bool


@dataclass(frozen=True)
class Described:
    id: str
    status: str
    """RUNNING, COMPLETED, …"""
    queue: str
    started: datetime | None
    closed: datetime | None
    activities: tuple[Pending, ...]
    children: tuple[str, ...]
    task: Task | None

    @property
    def running(self) -> bool:
        return self.status == "RUNNING"

    def of(self, activity: str) -> list[Pending]:
        """Pending activities of a type, without those that nobody waits for any more."""
        return [one for one in self.activities if one.activity == activity and one.state != "cancelling"]


@dataclass(frozen=True)
class QueueWorkers:
    """Who asks for work on a task queue."""

    queue: str
    there: bool
    words: str


class Temporal:
    """A client with deadlines. Raises UsageError when the server itself doesn't answer."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self.client = client
        self._settings = settings
        self._room = asyncio.Semaphore(AT_ONCE)

    async def describe(self, workflow: str) -> Described | None:
        """None when there is no such workflow, or its retention is over."""
        handle = self.client.get_workflow_handle(workflow)
        async with self._room:
            try:
                found = await handle.describe(rpc_timeout=timedelta(seconds=ANSWER_S))
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return None
                raise self._silent(error) from error
        raw = found.raw_description
        task = _task(raw.pending_workflow_task) if raw.HasField("pending_workflow_task") else None
        return Described(
            id=workflow,
            status=(found.status or WorkflowExecutionStatus.RUNNING).name,
            queue=found.task_queue,
            started=found.execution_time or found.start_time,
            closed=found.close_time,
            activities=tuple(_pending(workflow, one) for one in raw.pending_activities),
            children=tuple(child.workflow_id for child in raw.pending_children),
            task=task,
        )

    async def ask(self, workflow: str, query: str, kind: type[Result]) -> Result:
        """A query's answer. Raises Unanswered when no worker gives one in time, or it can't."""
        handle = self.client.get_workflow_handle(workflow)
        async with self._room:
            try:
                limit = timedelta(seconds=QUERY_S)
                answer: Result = await handle.query(query, result_type=kind, rpc_timeout=limit)
                return answer
            except WorkflowQueryFailedError as error:
                raise Unanswered(f"{workflow} answers with an error: {error}") from error
            except RPCError as error:
                if error.status in TIMED_OUT:
                    raise Unanswered(f"no worker has answered within {QUERY_S:.0f} s") from error
                if error.status is RPCStatusCode.UNAVAILABLE:
                    raise self._silent(error) from error
                raise Unanswered(error.message) from error

    async def running(self, kind: str) -> list[str]:
        """Ids of the workflows of a type that run, the oldest first."""
        found = []
        query = f"WorkflowType='{kind}' AND ExecutionStatus='Running'"
        try:
            async for one in self.client.list_workflows(query, rpc_timeout=timedelta(seconds=ANSWER_S)):
                found.append((one.start_time, one.id))
        except RPCError as error:
            raise self._silent(error) from error
        return [name for _, name in sorted(found)]

    async def history(self, workflow: str) -> list[HistoryEvent]:
        """The events of a workflow; none when it isn't there any more."""
        return [event async for event in self._events(workflow, WorkflowHistoryEventFilterType.ALL_EVENT)]

    async def _events(self, workflow: str, which: WorkflowHistoryEventFilterType) -> AsyncIterator[HistoryEvent]:
        events = self.client.get_workflow_handle(workflow).fetch_history_events(
            event_filter_type=which, rpc_timeout=timedelta(seconds=ANSWER_S)
        )
        try:
            async for event in events:
                yield event
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise self._silent(error) from error

    async def closing(self, workflow: str) -> str:
        """Why a workflow that has ended failed, in one line; empty when it didn't."""
        async for event in self._events(workflow, WorkflowHistoryEventFilterType.CLOSE_EVENT):
            if event.HasField("workflow_execution_failed_event_attributes"):
                return failure_line(event.workflow_execution_failed_event_attributes.failure)
        return ""

    async def workers(self, queue: str, *, workflows: bool = False) -> QueueWorkers:
        kind = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW if workflows else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
        request = DescribeTaskQueueRequest(
            namespace=self._settings.temporal_namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind
        )
        async with self._room:
            try:
                answer = await self.client.workflow_service.describe_task_queue(
                    request, timeout=timedelta(seconds=ANSWER_S)
                )
            except RPCError as error:
                raise self._silent(error) from error
        polls = {poll.identity: _time(poll.last_access_time) for poll in answer.pollers}
        return queue_workers(queue, polls, datetime.now(UTC))

    def _silent(self, error: RPCError) -> UsageError:
        why = "no answer in time" if error.status in TIMED_OUT else error.message
        return UsageError(f"Temporal at {self._settings.temporal}: {why}; `gyre status` shows the processes")


async def reach(settings: Settings) -> Temporal:
    """Raises TemporalUnreachable, and UsageError when the server takes the connection but doesn't answer."""
    try:
        async with asyncio.timeout(2 * ANSWER_S):
            return Temporal(await connect(settings), settings)
    except TimeoutError:
        raise UsageError(f"Temporal at {settings.temporal} has not answered within {2 * ANSWER_S:.0f} s") from None


def queue_workers(queue: str, polls: dict[str, datetime | None], now: datetime) -> QueueWorkers:
    """``polls``: identity (`pid@host`) of each worker that asked lately -> when."""
    words, there = [], False
    for identity, at in sorted(polls.items()):
        state = process_state(identity)
        ago = (now - at).total_seconds() if at is not None else 0.0
        if not state and ago > POLLS_S:
            state = f"has not asked for {ago:.0f} s"
        there = there or not state
        words.append(f"worker {identity}" + (f" {state}" if state else ""))
    return QueueWorkers(queue, there, ", ".join(words) or f"no worker polls {queue}")


def process_state(identity: str) -> str:
    """What is wrong with a worker of this machine, from its identity; "" when nothing is, or it is elsewhere."""
    pid, _, host = identity.partition("@")
    if host != socket.gethostname() or not pid.isdigit() or int(pid) == os.getpid():
        return ""
    if start_time(int(pid)) is None:
        return "is dead"
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return "is stopped by a signal" if stat.rpartition(")")[2].split()[0] in "Tt" else ""


def _pending(workflow: str, raw: PendingActivityInfo) -> Pending:
    options = raw.activity_options
    states: dict[int, State] = {
        PendingActivityState.PENDING_ACTIVITY_STATE_STARTED: "started",
        PendingActivityState.PENDING_ACTIVITY_STATE_CANCEL_REQUESTED: "cancelling",
    }
    state: State = states.get(raw.state, "scheduled")
    return Pending(
        workflow=workflow,
        activity=raw.activity_type.name,
        id=raw.activity_id,
        queue=options.task_queue.name,
        state=state,
        attempt=raw.attempt,
        scheduled=_time(raw.scheduled_time),
        started=_time(raw.last_started_time) if state != "scheduled" else None,
        heartbeat=_time(raw.last_heartbeat_time) if state != "scheduled" else None,
        again=_time(raw.next_attempt_schedule_time) if state == "scheduled" else None,
        worker=raw.last_worker_identity,
        failure=failure_line(raw.last_failure) if raw.HasField("last_failure") else "",
        last=0 < raw.maximum_attempts <= raw.attempt,
        expires=_time(raw.expiration_time) if _seconds(options.schedule_to_close_timeout) else None,
        schedule_to_start_s=_seconds(options.schedule_to_start_timeout),
        start_to_close_s=_seconds(options.start_to_close_timeout),
        heartbeat_s=_seconds(options.heartbeat_timeout),
    )


def failure_line(failure: Failure) -> str:
    """One line for people: the fault at the bottom."""
    while failure.HasField("cause"):
        failure = failure.cause
    kind = failure.application_failure_info.type if failure.HasField("application_failure_info") else ""
    return (f"{kind}: " if kind else "") + " ".join(failure.message.split())[:300]


def _task(raw: PendingWorkflowTaskInfo) -> Task:
    started = raw.state == PendingWorkflowTaskState.PENDING_WORKFLOW_TASK_STATE_STARTED
    return Task(raw.attempt, _time(raw.original_scheduled_time), started)


def _time(stamp: Timestamp) -> datetime | None:
    return stamp.ToDatetime(UTC) if stamp.seconds else None


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
