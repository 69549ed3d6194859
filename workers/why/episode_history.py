"""What a group's history says of one episode: when it was queued, started, ended and graded, and what failed.

Pure over Temporal's events. A start is in the history only once its attempt has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

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
    timeline = []
    for event in events:
        kind = event.WhichOneof("attributes") or ""
        attributes: Any = getattr(event, kind, None)
        text: str | None = None
        if kind == "activity_task_scheduled_event_attributes":
            activity = attributes.activity_type.name
            if attributes.activity_id in mine or activity == "process_group":
                scheduled[event.event_id] = activity
                text = WORDS[activity][0]
        elif kind.startswith("activity_task_") and (of := scheduled.get(attributes.scheduled_event_id)) is not None:
            text = _words(kind.removesuffix("_event_attributes"), of, attributes)
        if text is not None:
            timeline.append(Moment(event.event_time.ToDatetime(UTC), text))
    return timeline if "run_episode" in scheduled.values() else []


def _words(kind: str, activity: str, attributes: Any) -> str | None:
    """What became of a scheduled activity; None for what says nothing of the episode."""
    match kind:
        case "activity_task_started" if activity == "run_episode":
            attempt = attributes.attempt
            again = f", attempt {attempt} after {failure_line(attributes.last_failure)}" if attempt > 1 else ""
            return f"taken by worker {attributes.identity}{again}"
        case "activity_task_completed":
            return WORDS[activity][1]
        case "activity_task_failed" | "activity_task_timed_out":
            return f"{WORDS[activity][2]}: {failure_line(attributes.failure)}"
        case "activity_task_canceled":
            return "cancelled"
    return None


def restarted(lines: Sequence[str]) -> list[Moment]:
    """Generations that were lost, each line beginning with its time."""
    parts = (line.partition(" ") for line in lines)
    return [Moment(datetime.fromisoformat(at), text) for at, _, text in parts]
