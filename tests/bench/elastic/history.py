"""What things cost, read from the histories that Temporal keeps: role switches, training, updates, what surrounds an
episode. Nothing in production is changed or slowed for it.

It knows workflows and activities by their names and results, and not what a policy decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, NamedTuple

from temporalio.api.common.v1 import Payloads
from temporalio.client import Client

from workflows import names


@dataclass
class CompletedActivity:
    """One that has completed. Times are Unix seconds."""

    name: str
    scheduled: float
    given: Any
    started: float = 0.0
    completed: float = 0.0
    result: Any = None

    @property
    def seconds(self) -> float:
        """From the order to the answer."""
        return self.completed - self.scheduled


@dataclass
class WorkflowHistory:
    """A workflow's, in order of time."""

    began: float
    ended: float = 0.0
    activities: list[CompletedActivity] = field(default_factory=list)
    """By completion."""
    children: list[tuple[float, Any]] = field(default_factory=list)
    """When each child completed, and its result."""
    signals: list[tuple[float, str]] = field(default_factory=list)

    def of(self, name: str) -> list[CompletedActivity]:
        return [activity for activity in self.activities if activity.name == name]


async def history_of(client: Client, workflow: str) -> WorkflowHistory:
    """Of the newest run of a workflow."""
    fetched = await client.get_workflow_handle(workflow).fetch_history()
    history = WorkflowHistory(began=fetched.events[0].event_time.ToDatetime().timestamp())
    open_: dict[int, CompletedActivity] = {}
    for event in fetched.events:
        at = event.event_time.ToDatetime().timestamp()
        history.ended = at
        kind = event.WhichOneof("attributes")
        if kind == "activity_task_scheduled_event_attributes":
            scheduled = event.activity_task_scheduled_event_attributes
            open_[event.event_id] = CompletedActivity(scheduled.activity_type.name, at, _value(scheduled.input))
        elif kind == "activity_task_started_event_attributes":
            open_[event.activity_task_started_event_attributes.scheduled_event_id].started = at
        elif kind == "activity_task_completed_event_attributes":
            completed = event.activity_task_completed_event_attributes
            activity = open_.pop(completed.scheduled_event_id)
            activity.completed, activity.result = at, _value(completed.result)
            history.activities.append(activity)
        elif kind == "child_workflow_execution_completed_event_attributes":
            child = event.child_workflow_execution_completed_event_attributes
            history.children.append((at, _value(child.result)))
        elif kind == "workflow_execution_signaled_event_attributes":
            history.signals.append((at, event.workflow_execution_signaled_event_attributes.signal_name))
    return history


def _value(payloads: Payloads) -> Any:
    """Of the first argument, or the result."""
    data = payloads.payloads[0].data if payloads.payloads else b""
    return json.loads(data) if data else None  # a null has no data


class CellChange(NamedTuple):
    """Of a cell: when it was there (Unix seconds), and how long that took since the order."""

    at: float
    seconds: float


@dataclass
class CellSwitches:
    """Every change of a cell."""

    out: list[CellChange] = field(default_factory=list)
    """Rollout to training."""
    back: list[CellChange] = field(default_factory=list)
    """Training to rollout."""
    publish: list[CellChange] = field(default_factory=list)
    """Another version in the same role."""

    def between(self, start: float, end: float) -> int:
        """Role switches that ended in that time."""
        return sum(start < change.at <= end for change in (*self.out, *self.back))


def switches(history: WorkflowHistory) -> CellSwitches:
    """Of a cell's history. What a run begins with is no switch: the cell was idle."""
    changes, role, run, began = CellSwitches(), "", "", 0.0
    for activity in history.activities:
        if activity.name == "drain_cell":
            began = activity.scheduled
        elif activity.name in ("prepare_training", "serve_rollout") and began:
            of_run = activity.given["desired"]["context"]["run"]
            change = CellChange(activity.completed, activity.completed - began)
            if run == of_run:
                if role == activity.name:
                    changes.publish.append(change)
                else:
                    (changes.out if activity.name == "prepare_training" else changes.back).append(change)
            role, run, began = activity.name, of_run, 0.0
    return changes


@dataclass
class StepCosts:
    """Of one step."""

    open_s: float
    """From its opening until its first episode starts."""
    update_s: float
    """From the last claim's end to the candidate, without the satellites' sums."""
    gather_s: list[float]
    """Of each satellite's sum."""
    claims: list[tuple[int, float, float]]
    """(tokens, seconds in the replica, seconds from the order to the answer)."""
    micro_steps: list[int]
    """Tokens of each."""
    grade_s: list[float]
    """Of each group: from its last episode's end to its micro-steps."""
    around_s: list[float]
    """Of each episode: what its run takes beside the harness's own time."""


async def step_costs(client: Client, run: str, step: int) -> StepCosts:
    history = await history_of(client, names.step_id(run, step))
    tokens = {m["ref"]: int(m["tokens"]) for _, group in history.children for m in group["micro_steps"]}
    trainings, finish = history.of("train_micro_steps"), history.of("finish_step")[-1]
    claims = [
        (sum(tokens[ref] for ref in training.given["micro_steps"]), training.result["seconds"], training.seconds)
        for training in trainings
    ]
    gathers = [gather.seconds for gather in history.of("offer_gradients")]
    trained = max((training.completed for training in trainings), default=finish.scheduled)
    last = max(trained, max((at for at, _ in history.children), default=trained))
    first, graded, around = [], [], []
    for group in range(len(history.children)):
        of_group = await history_of(client, names.group_id(run, step, group))
        episodes = of_group.of("run_episode")
        first.append(min(activity.started for activity in episodes))
        done = of_group.of("process_group")[-1]
        graded.append(done.completed - max(activity.completed for activity in episodes))
        around += [activity.completed - activity.started - activity.result["wall_s"] for activity in episodes]
    return StepCosts(
        open_s=min(first) - history.began,
        update_s=finish.completed - last - sum(gathers),
        gather_s=gathers,
        claims=claims,
        micro_steps=list(tokens.values()),
        grade_s=graded,
        around_s=around,
    )


@dataclass
class MeasuredCosts:
    """What a simulation is to be told, in the median over what was measured. Seconds, and tokens per second."""

    switch_out_s: float
    switch_in_s: float
    publish_s: float
    open_s: float
    start_s: float
    update_s: float
    gather_s: float
    grade_s: float
    claim_overhead_s: float
    train_tokens_per_s: float
    micro_step_tokens: int


def costs_of(steps: Sequence[StepCosts], cells: Sequence[CellSwitches]) -> MeasuredCosts:
    claims = [claim for step in steps for claim in step.claims]
    return MeasuredCosts(
        switch_out_s=_median(c.seconds for cell in cells for c in cell.out),
        switch_in_s=_median(c.seconds for cell in cells for c in cell.back),
        publish_s=_median(c.seconds for cell in cells for c in cell.publish),
        open_s=_median(step.open_s for step in steps),
        start_s=_median(s for step in steps for s in step.around_s),
        update_s=_median(step.update_s for step in steps),
        gather_s=_median(s for step in steps for s in step.gather_s),
        grade_s=_median(s for step in steps for s in step.grade_s),
        claim_overhead_s=_median(whole - inside for _, inside, whole in claims),
        train_tokens_per_s=sum(tokens for tokens, _, _ in claims) / max(1e-9, sum(inside for _, inside, _ in claims)),
        micro_step_tokens=round(mean(tokens for step in steps for tokens in step.micro_steps)),
    )


def _median(values: Iterator[float]) -> float:
    known = list(values)
    return max(0.0, median(known)) if known else 0.0
