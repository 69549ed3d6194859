"""A run: what it waits for itself, and its open steps."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from infra.state import keys
from workers.errors import UsageError
from workers.why.snapshot import Snapshot, run_config
from workers.why.steps import step_answer
from workers.why.temporal import Described
from workers.why.wait import Answer, Wait
from workflows import names
from workflows.contracts.results import RunStatus


async def open_runs(snapshot: Snapshot) -> list[Answer]:
    """Every run that isn't over."""
    ids = await snapshot.temporal.running("gyre.Run")
    return list(await asyncio.gather(*(run_answer(snapshot, id_.removeprefix("gyre/")) for id_ in ids)))


async def run_answer(snapshot: Snapshot, run: str) -> Answer:
    """Raises UsageError when there is no such run."""
    workflow = names.run_id(run)
    described = await snapshot.temporal.describe(workflow)
    if described is None:
        raise UsageError(f"there is no run {run!r}: `gyre status` lists the runs")
    answer = Answer(about=f"run {run}", data={"status": described.status})
    if not described.running:
        answer.facts = [await snapshot.ended_fact(described)]
        return answer
    await snapshot.learn_queues(described)
    status = await snapshot.ask(answer, workflow, "status", RunStatus)
    answer.waits += snapshot.task_waits(answer.about, described)
    answer.waits += [snapshot.activity_wait(answer.about, pending) for pending in described.activities]
    steps = status.open_steps if status is not None else await _open_steps(snapshot, run)
    answers = await asyncio.gather(*(step_answer(snapshot, run, step) for step in steps))
    answer.parts = [part for part in answers if part is not None]
    if status is not None:
        answer.data |= status.model_dump(mode="json", exclude={"results"})
        trained = f"version {status.trained_version} trained, {status.steps_opened} steps opened"
        answer.facts.append(f"{status.phase}; {trained}")
        answer.waits += run_waits(snapshot, described, status, [part.data for part in answer.parts])
    return answer


def run_waits(snapshot: Snapshot, described: Described, status: RunStatus, steps: list[dict[str, Any]]) -> list[Wait]:
    """``steps``: what each open step says of itself."""
    run, state = status.run, snapshot.scheduler
    wait = partial(Wait, f"run {run}", described.id)
    if status.phase == "validating":
        return []  # its activity says it
    if status.phase == "waiting":
        return [_lease(snapshot, run, described)]
    if status.paused:
        held = state is not None and state.held and state.lease is not None and state.lease.run == run
        calls = ", and the calls of running episodes are held" if held else "; what runs goes to its end"
        reason = f"paused: no step is opened and no group started{calls}"
        return [wait(reason, ends=f"a person (`gyre resume {run}`)")]
    if not steps:
        return [wait("no step is queued", ends=f"a person (`gyre submit step --run {run}`, or `gyre cancel {run}`)")]
    open_steps = ", ".join(map(str, status.open_steps))
    done = "a step tells it that it is done; every 60 s it looks for one that has ended without a word"
    waits = [wait(f"its open steps: {open_steps}", ends=done)]
    if (why := _next_step(snapshot, status, steps)) is not None:
        reason, ends = why
        waits.append(Wait(f"step {run}/{status.steps_opened}", described.id, reason, ends=ends))
    return waits


def _next_step(snapshot: Snapshot, status: RunStatus, steps: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Why the run opens no further step, and what ends that; None when there is none to open, or it isn't known."""
    config = run_config(snapshot.blobs, status.run)
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


def _lease(snapshot: Snapshot, run: str, described: Described) -> Wait:
    state = snapshot.scheduler
    wait = partial(Wait, f"run {run}", names.scheduler_id(snapshot.settings.pool), since=described.started)
    if state is None or state.lease is None:
        return wait("the lease of the pool", ends="the scheduler grants it")
    holder = state.lease.run
    before = [request.run for request in state.waiting]
    ahead = before[: before.index(run)] if run in before else before
    reason = f"the lease of pool {state.pool}, which run {holder} has" + "".join(f", then {other}" for other in ahead)
    return wait(reason, ends=f"run {holder} ends by itself, or by a person (`gyre cancel {holder}`)")


async def _open_steps(snapshot: Snapshot, run: str) -> list[int]:
    """As Redis has them: no worker needs to answer for that."""
    if snapshot.shared.fault:
        return []
    try:
        return sorted(int(step) for step in await snapshot.redis.smembers(keys.open_steps(run)))
    except (RedisError, OSError):
        return []
