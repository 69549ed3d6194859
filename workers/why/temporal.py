"""What Temporal knows of a workflow, within bounds: each read has a deadline, and a worker that is away is an answer.

Descriptions come from the server and need no worker; queries need one. It knows nothing of what the waits mean.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypeVar

import psutil
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.enums.v1 import PendingActivityState, PendingWorkflowTaskState
from temporalio.api.failure.v1 import Failure
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.workflow.v1 import PendingActivityInfo, PendingWorkflowTaskInfo
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowHistoryEventFilterType,
    WorkflowQueryFailedError,
)
from temporalio.service import RPCError, RPCStatusCode

from infra.settings import Settings
from infra.temporal import connect
from workers.errors import UsageError
from workers.pollers import pollers

Result = TypeVar("Result")
State = Literal["scheduled", "started", "cancelling"]

ANSWER: Final = timedelta(seconds=5)
"""In which the server must answer."""
QUERY: Final = timedelta(seconds=3)
"""In which a worker must answer a query."""
AT_ONCE: Final = 32
"""Requests at once."""
POLLS_S: Final = 70.0
"""A worker that lives asks for work at least this often (a poll lasts a minute)."""

TIMED_OUT: Final = (RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED)
STATES: Final[dict[int, State]] = {
    PendingActivityState.PENDING_ACTIVITY_STATE_STARTED: "started",
    PendingActivityState.PENDING_ACTIVITY_STATE_CANCEL_REQUESTED: "cancelling",
}
"""Of an activity, as Temporal numbers them; every other one is scheduled."""
UNABLE: Final = {
    psutil.STATUS_ZOMBIE: "is dead",
    psutil.STATUS_DEAD: "is dead",
    psutil.STATUS_STOPPED: "is stopped by a signal",
    psutil.STATUS_TRACING_STOP: "is stopped by a signal",
}
"""States of a process in which it does no work."""


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
class WorkflowTask:
    """A workflow task that isn't done: the workflow's code waits for a worker, or fails in one."""

    attempt: int
    since: datetime | None
    started: bool


@dataclass(frozen=True)
class Described:
    id: str
    status: str
    """RUNNING, COMPLETED, …"""
    started: datetime | None
    closed: datetime | None
    activities: tuple[Pending, ...]
    children: tuple[str, ...]
    task: WorkflowTask | None

    @property
    def running(self) -> bool:
        return self.status == "RUNNING"

    def of(self, activity: str) -> list[Pending]:
        """Pending activities of a type, without those that nobody waits for any more."""
        return [a for a in self.activities if a.activity == activity and a.state != "cancelling"]


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

    @asynccontextmanager
    async def _request(self) -> AsyncIterator[None]:
        async with self._room:
            try:
                yield
            except RPCError as error:
                why = "no answer in time" if error.status in TIMED_OUT else error.message
                address = self._settings.temporal
                raise UsageError(f"Temporal at {address}: {why}; `gyre status` shows the processes") from error

    async def describe(self, workflow: str) -> Described | None:
        """None when there is no such workflow, or its retention is over."""
        async with self._request():
            try:
                described = await self.client.get_workflow_handle(workflow).describe(rpc_timeout=ANSWER)
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return None
                raise
        raw = described.raw_description
        return Described(
            id=workflow,
            status=(described.status or WorkflowExecutionStatus.RUNNING).name,
            started=described.execution_time or described.start_time,
            closed=described.close_time,
            activities=tuple(_pending(workflow, activity) for activity in raw.pending_activities),
            children=tuple(child.workflow_id for child in raw.pending_children),
            task=_task(raw.pending_workflow_task) if raw.HasField("pending_workflow_task") else None,
        )

    async def ask(self, workflow: str, query: str, kind: type[Result]) -> Result:
        """A query's answer. Raises Unanswered when no worker gives one in time, or it can't."""
        handle = self.client.get_workflow_handle(workflow)
        async with self._request():
            try:
                answer: Result = await handle.query(query, result_type=kind, rpc_timeout=QUERY)
                return answer
            except WorkflowQueryFailedError as error:
                raise Unanswered(f"{workflow} answers with an error: {error}") from error
            except RPCError as error:
                if error.status is RPCStatusCode.UNAVAILABLE:
                    raise
                late = f"no worker has answered within {QUERY.total_seconds():.0f} s"
                raise Unanswered(late if error.status in TIMED_OUT else error.message) from error

    async def running(self, kind: str) -> list[str]:
        """Ids of the workflows of a type that run, the oldest first."""
        query = f"WorkflowType='{kind}' AND ExecutionStatus='Running'"
        async with self._request():
            listed = [run async for run in self.client.list_workflows(query, rpc_timeout=ANSWER)]
        return [run.id for run in sorted(listed, key=lambda run: (run.start_time, run.id))]

    async def history(
        self,
        workflow: str,
        which: WorkflowHistoryEventFilterType = WorkflowHistoryEventFilterType.ALL_EVENT,
    ) -> list[HistoryEvent]:
        """The events of a workflow; none when it isn't there any more."""
        events = self.client.get_workflow_handle(workflow).fetch_history_events(
            event_filter_type=which, rpc_timeout=ANSWER
        )
        async with self._request():
            try:
                return [event async for event in events]
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return []
                raise

    async def closing(self, workflow: str) -> str:
        """Why a workflow that has ended failed, in one line; empty when it didn't."""
        for event in await self.history(workflow, WorkflowHistoryEventFilterType.CLOSE_EVENT):
            if event.HasField("workflow_execution_failed_event_attributes"):
                return failure_line(event.workflow_execution_failed_event_attributes.failure)
        return ""

    async def workers(self, queue: str, *, workflows: bool = False) -> QueueWorkers:
        async with self._request():
            polls = await pollers(self.client, queue, workflows=workflows, within=ANSWER)
        return queue_workers(queue, polls, datetime.now(UTC))


async def reach(settings: Settings) -> Temporal:
    """Raises TemporalUnreachable, and UsageError when the server takes the connection but doesn't answer."""
    seconds = 2 * ANSWER.total_seconds()
    try:
        async with asyncio.timeout(seconds):
            return Temporal(await connect(settings), settings)
    except TimeoutError:
        raise UsageError(f"Temporal at {settings.temporal} has not answered within {seconds:.0f} s") from None


def queue_workers(queue: str, polls: dict[str, datetime], now: datetime) -> QueueWorkers:
    """``polls``: identity (`pid@host`) of each worker that asked lately -> when."""
    words, there = [], False
    for identity, at in sorted(polls.items()):
        state = process_state(identity)
        ago = (now - at).total_seconds()
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
    try:
        return UNABLE.get(psutil.Process(int(pid)).status(), "")
    except psutil.NoSuchProcess:
        return "is dead"
    except psutil.AccessDenied:
        return ""


def _pending(workflow: str, raw: PendingActivityInfo) -> Pending:
    options = raw.activity_options
    state = STATES.get(raw.state, "scheduled")
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


def _task(raw: PendingWorkflowTaskInfo) -> WorkflowTask:
    started = raw.state == PendingWorkflowTaskState.PENDING_WORKFLOW_TASK_STATE_STARTED
    return WorkflowTask(raw.attempt, _time(raw.original_scheduled_time), started)


def _time(stamp: Timestamp) -> datetime | None:
    return stamp.ToDatetime(UTC) if stamp.seconds else None


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
