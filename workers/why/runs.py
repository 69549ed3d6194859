"""A run: what it waits for itself, and its open steps."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.exceptions import RedisError

from infra.state import keys
from workers.errors import UsageError
from workers.why.pending import activity_wait, task_waits
from workers.why.sight import Sight
from workers.why.steps import step_answer
from workers.why.temporal import Described, Unanswered
from workers.why.wait import Answer, Wait
from workflows import names
from workflows.contracts.results import RunStatus


async def open_runs(sight: Sight) -> list[Answer]:
    """Every run that isn't over."""
    found = await sight.temporal.running("gyre.Run")
    return list(await asyncio.gather(*(run_answer(sight, one.removeprefix("gyre/")) for one in found)))


async def run_answer(sight: Sight, run: str) -> Answer:
    """Raises UsageError when there is no such run."""
    workflow = names.run_id(run)
    described = await sight.temporal.describe(workflow)
    if described is None:
        raise UsageError(f"there is no run {run!r}: `gyre status` lists the runs")
    answer = Answer(about=f"run {run}", data={"status": described.status})
    if not described.running:
        at = f" at {described.closed:%Y-%m-%d %H:%M:%S} UTC" if described.closed is not None else ""
        why = await sight.temporal.closing(workflow)
        answer.facts = [f"{described.status}{at}" + (f": {why}" if why else "")]
        return answer
    await sight.learn_queues({one.queue for one in described.activities})
    status = None
    if not sight.silence:
        try:
            status = await sight.temporal.ask(workflow, "status", RunStatus)
        except Unanswered as error:
            answer.facts.append(f"its state is not known: {error}")
    answer.waits += task_waits(answer.about, workflow, described.task, sight.control, sight.now)
    answer.waits += [activity_wait(answer.about, one, sight.queues, sight.now) for one in described.activities]
    steps = status.open_steps if status is not None else await _open_steps(sight, run)
    found = await asyncio.gather(*(step_answer(sight, run, step) for step in steps))
    answer.parts = [part for part in found if part is not None]
    if status is not None:
        answer.data |= status.model_dump(mode="json", exclude={"results"})
        trained = f"version {status.trained_version} trained, {status.steps_opened} steps opened"
        answer.facts.append(f"{status.phase}; {trained}")
        answer.waits += run_waits(sight, described, status, [part.data for part in answer.parts])
    return answer


def run_waits(sight: Sight, described: Described, status: RunStatus, steps: list[dict[str, Any]]) -> list[Wait]:
    """``steps``: what each open step says of itself."""
    what, run = f"run {status.run}", status.run
    if status.phase == "validating":
        return []  # its activity says it
    if status.phase == "waiting":
        return [_lease(sight, what, run, described)]
    if status.paused:
        reason = "paused: no step is opened and no group started; what runs goes to its end"
        state = sight.scheduler
        if state is not None and state.held and state.lease is not None and state.lease.run == run:
            reason = "paused: no step is opened and no group started, and the calls of running episodes are held"
        return [Wait(what=what, owner=described.id, reason=reason, ends=f"a person (`gyre resume {run}`)")]
    if not steps:
        reason, ends = "no step is queued", f"a person (`gyre submit step --run {run}`, or `gyre cancel {run}`)"
        return [Wait(what=what, owner=described.id, reason=reason, ends=ends)]
    open_steps = ", ".join(map(str, status.open_steps))
    waits = [
        Wait(
            what=what,
            owner=described.id,
            reason=f"its open steps: {open_steps}",
            ends="a step tells it that it is done; every 60 s it looks for one that has ended without a word",
        )
    ]
    if (why := _next_step(sight, status, steps)) is not None:
        reason, ends = why
        waits.append(Wait(what=f"step {run}/{status.steps_opened}", owner=described.id, reason=reason, ends=ends))
    return waits


def _next_step(sight: Sight, status: RunStatus, steps: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Why the run opens no further step, and what ends that; None when there is none to open, or it isn't known."""
    config = sight.run_config(status.run)
    training = [step for step in steps if step.get("train")]
    if any(step.get("train") is False for step in steps):
        return "not opened: an evaluation is open, and no later version is trained before it has ended", "it has ended"
    staleness, updates = config.get("max_staleness"), config.get("steps", 0)
    if staleness is None or len(training) != len(steps) or status.trained_version + len(training) >= updates:
        return None
    if len(training) <= staleness:
        return "not opened: an evaluation is due first", "the open steps are done, and then that evaluation"
    return (
        f"not opened: max_staleness is {staleness}, and version {status.trained_version + 1} is not trained yet",
        "the oldest open step is done",
    )


def _lease(sight: Sight, what: str, run: str, described: Described) -> Wait:
    state = sight.scheduler
    owner = names.scheduler_id(sight.settings.pool)
    if state is None or state.lease is None:
        reason, ends = "the lease of the pool", "the scheduler grants it"
        return Wait(what=what, owner=owner, reason=reason, since=described.started, ends=ends)
    holder = state.lease.run
    before = [request.run for request in state.waiting]
    ahead = before[: before.index(run)] if run in before else before
    reason = f"the lease of pool {state.pool}, which run {holder} has" + "".join(f", then {one}" for one in ahead)
    ends = f"run {holder} ends by itself, or by a person (`gyre cancel {holder}`)"
    return Wait(what=what, owner=owner, reason=reason, since=described.started, ends=ends)


async def _open_steps(sight: Sight, run: str) -> list[int]:
    """As Redis has them: no worker needs to answer for that."""
    if sight.shared.fault:
        return []
    try:
        return sorted(int(step) for step in await sight.redis.smembers(keys.open_steps(run)))
    except (RedisError, OSError):
        return []
