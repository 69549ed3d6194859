"""What became of an episode, in words and times.

Pure: from its result, its call records, its siblings' rewards, and the history of its group's workflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from temporalio.api.history.v1 import HistoryEvent

from trajectory.advantage import group_advantage
from trajectory.records import CallRecord
from workers.records.regrade import short_evaluator
from workers.why.temporal import failure_line
from workers.why.wait import Moment
from workflows.contracts.results import EpisodeResult, Outcome

MEANING: Final = {
    Outcome.COMPLETED: "the harness ended by itself",
    Outcome.TIMED_OUT: "its budget was spent, and what it left is graded",
    Outcome.TRUNCATED: "a limit of the run was reached, and what it left is graded",
    Outcome.HARNESS_FAILED: "the harness ended with an error; it is graded if it had made calls and left a workspace",
    Outcome.EVALUATOR_FAILED: "the evaluator gave no verdict; `gyre regrade` asks it again",
    Outcome.INFRA_FAILED: "what the harness stands on failed, which says nothing of the policy",
    Outcome.CANCELLED: "it was cancelled, with its step or its run",
}
WITHOUT_GRADIENT: Final = {
    "too_few": "fewer than two of its episodes have a reward",
    "no_variance": "all its rewards are equal",
}
LONG_HOLD_S: Final = 5.0
"""Seconds from which a held call is told in the timeline."""
TOLD_CALLS: Final = 5
WORDS: Final = {
    "run_episode": ("queued for a harness worker", "its harness has ended", "running it failed"),
    "grade_episode": ("queued for its evaluator", "graded", "its evaluator failed"),
    "process_group": ("its group has ended, and is processed", "its group is processed", "processing its group failed"),
}
"""Activity -> what its scheduling, its end and its failure mean to the episode."""


def reasons(result: EpisodeResult, budget: dict[str, float]) -> list[str]:
    """Outcome, budget, generations and verdict. ``budget``: the run's ``active_s`` and ``wall_s``; empty: not known."""
    ended = result.exit
    why = f": {result.detail}" if result.detail else ""
    lines = [f"{result.outcome.value}{why} ({MEANING[result.outcome]})"]
    if ended.outcome is not result.outcome:
        lines.append(f"its harness before that: {ended.outcome.value}" + (f", {ended.detail}" if ended.detail else ""))
    lines.append(
        f"active {ended.active_s:.1f} s{_of(budget.get('active_s'))}, held {ended.held_s:.1f} s, "
        f"wall {ended.wall_s:.1f} s{_of(budget.get('wall_s'))}"
    )
    if ended.generation > 1 or ended.restarts:
        times = "once" if len(ended.restarts) == 1 else f"{len(ended.restarts)} times"
        lines.append(f"started again {times}; generation {ended.generation} ended it")
    evaluator = short_evaluator(result.evaluator)
    if result.reward is not None:
        lines.append(f"reward {result.reward:.3f}, by evaluator {evaluator}")
    elif result.outcome is Outcome.EVALUATOR_FAILED:
        lines.append(f"no reward: evaluator {evaluator or 'unknown'} failed")
    else:
        lines.append("no reward: it was not graded")
    return lines


def calls_made(records: Sequence[CallRecord]) -> list[str]:
    if not records:
        return ["no call was recorded"]
    last = records[-1]
    moved = sum(len(record.cells) > 1 for record in records)
    count = "1 call" if len(records) == 1 else f"{len(records)} calls"
    line = f"{count}, {moved} moved between cells; the last, of {_agent(last)}, ended with `{last.finish_reason}`"
    return [f"{line} on {' → '.join(last.cells)} at {_end(last):%H:%M:%S}"]


def standing(result: EpisodeResult, siblings: Sequence[float | None], train: bool) -> list[str]:
    """What the episode counts in. ``siblings``: the rewards of its group's episodes, its own included."""
    if result.reward is None:
        training = "its group's advantages, N, what is trained, " if train else ""
        return [f"excluded, never zero: it is left out of {training}the mean reward and the pass rate"]
    if not train:
        return ["counts in the mean reward and the pass rate; an evaluation trains nothing"]
    lines = ["counts in its group's advantages, N, the mean reward and the pass rate"]
    advantage = group_advantage(siblings, [1] * len(siblings))
    if advantage.reason in WITHOUT_GRADIENT:
        lines.append(f"its group gives no gradient ({advantage.reason}): {WITHOUT_GRADIENT[advantage.reason]}")
    return lines


def call_moments(records: Sequence[CallRecord]) -> list[Moment]:
    """The first and the last call, and those that were held long."""
    if not records:
        return []
    held = sorted((record for record in records if record.held_s >= LONG_HOLD_S), key=lambda record: -record.held_s)
    return [
        Moment(_time(records[0].started_at), "first call"),
        *(
            Moment(_time(call.started_at), f"call {call.seq} is held {call.held_s:.1f} s ({' → '.join(call.cells)})")
            for call in held[:TOLD_CALLS]
        ),
        Moment(_end(records[-1]), f"last call ({records[-1].seq}) has ended"),
    ]


def history_moments(events: Sequence[HistoryEvent], index: int) -> list[Moment]:
    """When it was queued, started, ended and graded, and what failed. A start is there only once its attempt has ended.

    ``index``: of the episode in its group. Nothing for one that the group doesn't have.
    """
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


def as_data(result: EpisodeResult, records: Sequence[CallRecord]) -> dict[str, Any]:
    data = result.model_dump(mode="json")
    return {**data, "excluded": result.reward is None, "recorded_calls": len(records)}


def _of(limit: float | None) -> str:
    return f" of {limit:g} s" if limit is not None else ""


def _agent(record: CallRecord) -> str:
    return "the main agent" if record.agent == "root" else f"agent {record.agent}"


def _end(record: CallRecord) -> datetime:
    return _time(record.started_at + record.active_s + record.held_s)


def _time(unix_s: float) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC)
