"""What a group's history says of one episode: when it was queued, started, ended and graded, and what failed.

Pure over Temporal's events. A start is in the history only once its attempt has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from temporalio.api.history.v1 import HistoryEvent

from workers.why.temporal import failure_line
from workers.why.wait import Moment

WORDS = {
    "run_episode": ("queued for a harness worker", "its harness has ended", "running it failed"),
    "grade_episode": ("queued for its evaluator", "graded", "its evaluator failed"),
    "process_group": ("its group has ended, and is processed", "its group is processed", "processing its group failed"),
}
"""Activity -> what its scheduling, its end and its failure mean to the episode."""


def moments(events: Sequence[HistoryEvent], index: int) -> list[Moment]:
    """``index``: of the episode in its group. Nothing for one that the group doesn't have."""
    mine = {f"ep-{index:02d}", f"grade-{index:02d}"}
    scheduled: dict[int, str] = {}
    found = []
    for event in events:
        at = event.event_time.ToDatetime(UTC)
        if event.HasField("activity_task_scheduled_event_attributes"):
            asked = event.activity_task_scheduled_event_attributes
            activity = asked.activity_type.name
            if asked.activity_id in mine or activity == "process_group":
                scheduled[event.event_id] = activity
                found.append(Moment(at=at, text=WORDS[activity][0]))
        elif (told := _told(event, scheduled)) is not None:
            found.append(Moment(at=at, text=told))
    return found if "run_episode" in scheduled.values() else []


def _told(event: HistoryEvent, scheduled: dict[int, str]) -> str | None:
    if event.HasField("activity_task_started_event_attributes"):
        started = event.activity_task_started_event_attributes
        if scheduled.get(started.scheduled_event_id) != "run_episode":
            return None
        again = f", attempt {started.attempt} after {failure_line(started.last_failure)}" if started.attempt > 1 else ""
        return f"taken by worker {started.identity}{again}"
    if event.HasField("activity_task_completed_event_attributes"):
        activity = scheduled.get(event.activity_task_completed_event_attributes.scheduled_event_id)
        return WORDS[activity][1] if activity is not None else None
    if event.HasField("activity_task_failed_event_attributes"):
        failed = event.activity_task_failed_event_attributes
        return _failed(scheduled.get(failed.scheduled_event_id), failure_line(failed.failure))
    if event.HasField("activity_task_timed_out_event_attributes"):
        late = event.activity_task_timed_out_event_attributes
        return _failed(scheduled.get(late.scheduled_event_id), failure_line(late.failure))
    if event.HasField("activity_task_canceled_event_attributes"):
        cancelled = event.activity_task_canceled_event_attributes
        return "cancelled" if cancelled.scheduled_event_id in scheduled else None
    return None


def _failed(activity: str | None, why: str) -> str | None:
    return f"{WORDS[activity][2]}: {why}" if activity is not None else None


def restarted(lines: Sequence[str]) -> list[Moment]:
    """Generations that were lost, each line beginning with its time."""
    found = []
    for line in lines:
        at, _, text = line.partition(" ")
        found.append(Moment(at=datetime.fromisoformat(at), text=text))
    return found
