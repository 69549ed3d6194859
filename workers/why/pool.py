"""The pool and its cells: who has leased it, what each cell is and moves to, the last decisions with their reasons."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Final

from workers.why.activity_waits import owner_of
from workers.why.snapshot import Snapshot, role_words
from workers.why.temporal import Described
from workers.why.wait import Answer, Wait
from workflows import names
from workflows.contracts.orders import CellStatus
from workflows.scheduler import SchedulerState

GIVES_BACK_S: Final = 10.0
"""Seconds in which the pool hears that a run has ended."""


async def pool_answer(snapshot: Snapshot) -> Answer:
    """The pool, with a part for each of its cells."""
    state, described = snapshot.scheduler, snapshot.described
    answer = Answer(about=f"pool {snapshot.settings.pool}", waits=snapshot.faults)
    await snapshot.learn_queues(described)
    answer.waits += snapshot.task_waits(answer.about, described)
    if state is not None:
        answer.facts = _facts(state)
        answer.data = {
            "leased_to": state.lease.run if state.lease else "",
            "waiting": [request.run for request in state.waiting],
            "version": state.version,
            "reason": state.reason,
            "lost": state.lost,
        }
    answer.waits.append(_scheduler_wait(answer.about, snapshot))
    answer.waits += await _dead_holder(answer.about, snapshot)
    cells = state.cells if state is not None else snapshot.settings.cell_names()
    answer.parts = list(await asyncio.gather(*(_cell(snapshot, cell) for cell in cells)))
    return answer


def decisions(state: SchedulerState | None, count: int) -> list[dict[str, Any]]:
    """The last ``count`` decisions of the scheduler's policy, the newest last."""
    return [decision.model_dump() for decision in state.recent[-count:]] if state is not None and count else []


def _facts(state: SchedulerState) -> list[str]:
    leased = f"leased to run {state.lease.run}" if state.lease else "leased to nobody"
    policy = f", policy {state.lease.scheduler.policy}" if state.lease else ""
    facts = [f"{leased}{policy}, version {state.version}", f"last decision: {state.reason}"]
    if state.waiting:
        facts.insert(1, "waiting for the lease: " + ", ".join(request.run for request in state.waiting))
    return facts


def _scheduler_wait(what: str, snapshot: Snapshot) -> Wait:
    described, state = snapshot.described, snapshot.scheduler
    wait = partial(Wait, what, described.id)
    if state is not None and state.held and state.lease is not None:
        run = state.lease.run
        return wait(f"run {run} is paused and holds its calls", ends=f"a person (`gyre resume {run}`)")
    if watching := described.of("watch_demand"):
        return snapshot.activity_wait(what, watching[-1])
    if state is not None and state.lease is None:
        return wait("no run has leased it", ends="a person (`gyre submit run`)")
    reason = "no training step is open, so there is nothing to decide" if state is not None else "not known"
    return wait(reason, ends="the run that has leased it opens a step, or ends")


async def _dead_holder(what: str, snapshot: Snapshot) -> list[Wait]:
    """A run gives the lease back as it ends; one that was terminated can't."""
    state = snapshot.scheduler
    if state is None or state.lease is None:
        return []
    run = state.lease.run
    holder = await snapshot.temporal.describe(names.run_id(run))
    closed = holder.closed if holder is not None else None
    if holder is not None and (closed is None or (snapshot.now - closed).total_seconds() < GIVES_BACK_S):
        return []
    status, scheduler = holder.status if holder is not None else "gone", snapshot.described.id
    reason = f"leased to run {run}, which is {status} and does not give it back"
    ends = f'a person (signal `release_lease` with "{run}" to {scheduler})'
    return [Wait(what, scheduler, reason, since=closed, ends=ends)]


async def _cell(snapshot: Snapshot, cell: str) -> Answer:
    answer = Answer(about=f"cell {cell}")
    workflow = names.cell_id(cell)
    described = await snapshot.temporal.describe(workflow)
    if described is None or not described.running:
        reason = "its workflow does not run"
        answer.waits = [Wait(answer.about, workflow, reason, ends="a person (`gyre up` starts it)")]
        return answer
    await snapshot.learn_queues(described)
    answer.waits += snapshot.task_waits(answer.about, described)
    status = await snapshot.ask(answer, workflow, "status", CellStatus)
    answer.waits.append(cell_wait(snapshot, cell, described, status))
    if (route := snapshot.shared.routes.get(cell)) is not None:
        load = snapshot.proxy.get("routes", {}).get(cell, {})
        busy = f", {load['requests']} requests of the proxy" if "requests" in load else ""
        answer.facts.append(f"route {'open' if route.open else 'closed'}, version {route.version}{busy}")
    answer.data = status.model_dump() if status is not None else {}
    return answer


def cell_wait(snapshot: Snapshot, cell: str, described: Described, status: CellStatus | None) -> Wait:
    """The wait of one cell: for what it is being brought to, or, when that holds, for the next decision."""
    what, scheduler = f"cell {cell}", snapshot.scheduler
    orders = [a for a in described.activities if a.activity != "watch_cell" and a.state != "cancelling"]
    desired = scheduler.desired.get(cell) if scheduler is not None else None
    target = role_words(desired) if desired is not None else "is told nothing"
    lost = (status.lost if status is not None else "") or (
        scheduler.lost.get(cell, "") if scheduler is not None else ""
    )
    if lost:
        reaching = described.of("reach_cell")
        owner = owner_of(reaching[-1]) if reaching else described.id
        since = reaching[-1].scheduled if reaching else None
        ends = "all its parts answer; the pool does without it until then"
        return Wait(what, owner, f"lost: {lost}", since=since, ends=ends)
    since = _time(status.wanted_at) if status is not None else None
    wait = partial(Wait, what, described.id)
    if status is not None and status.again_at and not orders:
        reason = f"attempt {status.failures} to reach its state ({target}) failed: {status.error}"
        return wait(reason, since=since, deadline=_time(status.again_at), ends="the next attempt begins")
    if orders:
        ordered = snapshot.activity_wait(what, orders[-1])
        was = f"was {status.actual}, " if status is not None and status.actual else ""
        tries = f"; {status.failures} attempts have failed: {status.error}" if status and status.failures else ""
        if status is not None and status.draining_s is not None:
            tries = f", for {status.draining_s:g} s at most before they are moved" + tries
        reason = f"{was}{target} from now on: {ordered.reason}{tries}"
        return replace(ordered, reason=reason, since=since or ordered.since)
    if status is not None and not status.holds:
        return wait(f"was {status.actual}, {target} from now on", since=since, ends="its workflow takes the next turn")
    watching = described.of("watch_cell")
    why = f": {desired.reason}" if desired is not None and desired.reason and desired.role != "idle" else ""
    return Wait(
        what,
        owner_of(watching[-1]) if watching else described.id,
        f"{target}{why}",
        since=_time(status.reached_at) if status is not None else None,
        ends="the scheduler decides otherwise, or one of its processes is replaced",
    )


def _time(iso: str) -> datetime | None:
    return datetime.fromisoformat(iso) if iso else None
