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
class Activity:
    """One that has completed. Times are Unix seconds."""

    name: str
    scheduled: float
    given: Any
    started: float = 0.0
    completed: float = 0.0
    result: Any = None


@dataclass
class History:
    """A workflow's, in order of time."""

    began: float
    ended: float = 0.0
    activities: list[Activity] = field(default_factory=list)
    """By completion."""
    children: list[tuple[float, Any]] = field(default_factory=list)
    """When each child completed, and its result."""
    signals: list[tuple[float, str]] = field(default_factory=list)

    def of(self, name: str) -> list[Activity]:
        return [one for one in self.activities if one.name == name]


async def history_of(client: Client, workflow: str) -> History:
    """Of the newest run of a workflow."""
    fetched = await client.get_workflow_handle(workflow).fetch_history()
    found = History(began=fetched.events[0].event_time.ToDatetime().timestamp())
    open_: dict[int, Activity] = {}
    for event in fetched.events:
        at = event.event_time.ToDatetime().timestamp()
        found.ended = at
        kind = event.WhichOneof("attributes")
        if kind == "activity_task_scheduled_event_attributes":
            scheduled = event.activity_task_scheduled_event_attributes
            open_[event.event_id] = Activity(scheduled.activity_type.name, at, _value(scheduled.input))
        elif kind == "activity_task_started_event_attributes":
            open_[event.activity_task_started_event_attributes.scheduled_event_id].started = at
        elif kind == "activity_task_completed_event_attributes":
            completed = event.activity_task_completed_event_attributes
            one = open_.pop(completed.scheduled_event_id)
            one.completed, one.result = at, _value(completed.result)
            found.activities.append(one)
        elif kind == "child_workflow_execution_completed_event_attributes":
            child = event.child_workflow_execution_completed_event_attributes
            found.children.append((at, _value(child.result)))
        elif kind == "workflow_execution_signaled_event_attributes":
            found.signals.append((at, event.workflow_execution_signaled_event_attributes.signal_name))
    return found


def _value(payloads: Payloads) -> Any:
    """Of the first argument, or the result."""
    data = payloads.payloads[0].data if payloads.payloads else b""
    return json.loads(data) if data else None  # a null has no data


class Change(NamedTuple):
    """Of a cell: when it was there (Unix seconds), and how long that took since the order."""

    at: float
    seconds: float


@dataclass
class Switches:
    """Every change of a cell."""

    out: list[Change] = field(default_factory=list)
    """Rollout to training."""
    back: list[Change] = field(default_factory=list)
    """Training to rollout."""
    publish: list[Change] = field(default_factory=list)
    """Another version in the same role."""

    def between(self, start: float, end: float) -> int:
        """Role switches that ended in that time."""
        return sum(start < change.at <= end for change in (*self.out, *self.back))


def switches(history: History) -> Switches:
    """Of a cell's history. What a run begins with is no switch: the cell was idle."""
    found, role, run, began = Switches(), "", "", 0.0
    for one in history.activities:
        if one.name == "drain_cell":
            began = one.scheduled
        elif one.name in ("prepare_training", "serve_rollout") and began:
            of_run = one.given["desired"]["context"]["run"]
            change = Change(one.completed, one.completed - began)
            if run == of_run:
                if role == one.name:
                    found.publish.append(change)
                else:
                    (found.out if one.name == "prepare_training" else found.back).append(change)
            role, run, began = one.name, of_run, 0.0
    return found


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
    claims = [
        (sum(tokens[ref] for ref in one.given["micro_steps"]), one.result["seconds"], one.completed - one.scheduled)
        for one in history.of("train_micro_steps")
    ]
    gathers = [one.completed - one.scheduled for one in history.of("offer_gradients")]
    finish = history.of("finish_step")[-1]
    trained = max((one.completed for one in history.of("train_micro_steps")), default=finish.scheduled)
    last = max(trained, max((at for at, _ in history.children), default=trained))
    first, graded, around = [], [], []
    for group in range(len(history.children)):
        of_group = await history_of(client, names.group_id(run, step, group))
        episodes = of_group.of("run_episode")
        first.append(min(one.started for one in episodes))
        done = of_group.of("process_group")[-1]
        graded.append(done.completed - max(one.completed for one in episodes))
        around += [one.completed - one.started - one.result["wall_s"] for one in episodes]
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
class Costs:
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


def costs_of(steps: Sequence[StepCosts], cells: Sequence[Switches]) -> Costs:
    claims = [claim for step in steps for claim in step.claims]
    return Costs(
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
    found = list(values)
    return max(0.0, median(found)) if found else 0.0
