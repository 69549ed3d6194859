"""The pool and its cells: who has leased it, what each cell is and moves to, the last decisions with their reasons."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any, Final

from workers.why.pending import activity_wait, owner_of, task_waits
from workers.why.sight import Sight, role_words
from workers.why.temporal import Described, Unanswered
from workers.why.wait import Answer, Wait
from workflows import names
from workflows.contracts.orders import CellStatus
from workflows.scheduler import SchedulerState

GIVES_BACK_S: Final = 10.0
"""Seconds in which the pool hears that a run has ended."""


async def pool_answer(sight: Sight) -> Answer:
    """The pool, with a part for each of its cells."""
    state, described = sight.scheduler, sight.described
    answer = Answer(about=f"pool {sight.settings.pool}", waits=list(sight.faults))
    await sight.learn_queues({one.queue for one in described.activities})
    answer.waits += task_waits(answer.about, described.id, described.task, sight.control, sight.now)
    if state is not None:
        answer.facts = _facts(state)
        answer.data = {
            "leased_to": state.lease.run if state.lease else "",
            "waiting": [request.run for request in state.waiting],
            "version": state.version,
            "reason": state.reason,
            "lost": state.lost,
        }
    answer.waits.append(_scheduler_wait(answer.about, sight))
    answer.waits += await _dead_holder(answer.about, sight)
    cells = state.cells if state is not None else sight.settings.cell_names()
    answer.parts = list(await asyncio.gather(*(_cell(sight, cell) for cell in cells)))
    return answer


def decisions(state: SchedulerState | None, count: int) -> list[dict[str, Any]]:
    """The last ``count`` decisions of the scheduler's policy, the newest last."""
    return [decided.model_dump() for decided in state.recent[-count:]] if state is not None and count else []


def _facts(state: SchedulerState) -> list[str]:
    leased = f"leased to run {state.lease.run}" if state.lease else "leased to nobody"
    policy = f", policy {state.lease.scheduler.policy}" if state.lease else ""
    facts = [f"{leased}{policy}, version {state.version}", f"last decision: {state.reason}"]
    if state.waiting:
        facts.insert(1, "waiting for the lease: " + ", ".join(request.run for request in state.waiting))
    return facts


def _scheduler_wait(what: str, sight: Sight) -> Wait:
    described, state = sight.described, sight.scheduler
    owner = described.id
    if state is not None and state.held and state.lease is not None:
        run = state.lease.run
        ends = f"a person (`gyre resume {run}`)"
        return Wait(what=what, owner=owner, reason=f"run {run} is paused and holds its calls", ends=ends)
    watching = described.of("watch_demand")
    if watching:
        return activity_wait(what, watching[-1], sight.queues, sight.now)
    if state is not None and state.lease is None:
        return Wait(what=what, owner=owner, reason="no run has leased it", ends="a person (`gyre submit run`)")
    reason = "no training step is open, so there is nothing to decide" if state is not None else "not known"
    return Wait(what=what, owner=owner, reason=reason, ends="the run that has leased it opens a step, or ends")


async def _dead_holder(what: str, sight: Sight) -> list[Wait]:
    """A run gives the lease back as it ends; one that was terminated can't."""
    state = sight.scheduler
    if state is None or state.lease is None:
        return []
    run = state.lease.run
    holder = await sight.temporal.describe(names.run_id(run))
    if holder is not None and (holder.closed is None or (sight.now - holder.closed).total_seconds() < GIVES_BACK_S):
        return []
    status = holder.status if holder is not None else "gone"
    reason = f"leased to run {run}, which is {status} and does not give it back"
    ends = f'a person (signal `release_lease` with "{run}" to {sight.described.id})'
    since = holder.closed if holder is not None else None
    return [Wait(what=what, owner=sight.described.id, reason=reason, since=since, ends=ends)]


async def _cell(sight: Sight, cell: str) -> Answer:
    answer = Answer(about=f"cell {cell}")
    workflow = names.cell_id(cell)
    described = await sight.temporal.describe(workflow)
    if described is None or not described.running:
        reason = "its workflow does not run"
        answer.waits = [Wait(what=answer.about, owner=workflow, reason=reason, ends="a person (`gyre up` starts it)")]
        return answer
    await sight.learn_queues({one.queue for one in described.activities})
    answer.waits += task_waits(answer.about, workflow, described.task, sight.control, sight.now)
    status = None
    if not sight.silence:
        try:
            status = await sight.temporal.ask(workflow, "status", CellStatus)
        except Unanswered as error:
            answer.facts.append(f"its state is not known: {error}")
    answer.waits.append(cell_wait(sight, cell, described, status))
    route = sight.shared.routes.get(cell)
    if route is not None:
        loads = sight.proxy.get("routes", {}).get(cell, {}) if sight.proxy is not None else {}
        busy = f", {loads['requests']} requests of the proxy" if "requests" in loads else ""
        answer.facts.append(f"route {'open' if route.open else 'closed'}, version {route.version}{busy}")
    answer.data = status.model_dump() if status is not None else {}
    return answer


def cell_wait(sight: Sight, cell: str, described: Described, status: CellStatus | None) -> Wait:
    """The wait of one cell: for what it is being brought to, or, when that holds, for the next decision."""
    what, now = f"cell {cell}", sight.now
    orders = [one for one in described.activities if one.activity != "watch_cell" and one.state != "cancelling"]
    desired = sight.scheduler.desired.get(cell) if sight.scheduler is not None else None
    target = role_words(desired) if desired is not None else "is told nothing"
    since = _time(status.wanted_at) if status is not None else None
    lost = status.lost if status is not None else ""
    if sight.scheduler is not None:
        lost = lost or sight.scheduler.lost.get(cell, "")
    if lost:
        reaching = described.of("reach_cell")
        owner = owner_of(reaching[-1]) if reaching else described.id
        since = reaching[-1].scheduled if reaching else None
        ends = "all its parts answer; the pool does without it until then"
        return Wait(what=what, owner=owner, reason=f"lost: {lost}", since=since, ends=ends)
    if status is not None and status.again_at and not orders:
        reason = f"attempt {status.failures} to reach its state ({target}) failed: {status.error}"
        again = _time(status.again_at)
        return Wait(
            what=what, owner=described.id, reason=reason, since=since, deadline=again, ends="the next attempt begins"
        )
    if orders:
        wait = activity_wait(what, orders[-1], sight.queues, now)
        was = f"was {status.actual}, " if status is not None and status.actual else ""
        tries = f"; {status.failures} attempts have failed: {status.error}" if status and status.failures else ""
        if status is not None and status.draining_s is not None:
            tries = f", for {status.draining_s:g} s at most before they are moved" + tries
        reason = f"{was}{target} from now on: {wait.reason}{tries}"
        return wait.model_copy(update={"reason": reason, "since": since or wait.since})
    if status is not None and not status.holds:
        reason = f"was {status.actual}, {target} from now on"
        return Wait(what=what, owner=described.id, reason=reason, since=since, ends="its workflow takes the next turn")
    watching = described.of("watch_cell")
    owner = owner_of(watching[-1]) if watching else described.id
    reached = _time(status.reached_at) if status is not None else None
    why = f": {desired.reason}" if desired is not None and desired.reason and desired.role != "idle" else ""
    reason, ends = f"{target}{why}", "the scheduler decides otherwise, or one of its processes is replaced"
    return Wait(what=what, owner=owner, reason=reason, since=reached, ends=ends)


def _time(iso: str) -> datetime | None:
    return datetime.fromisoformat(iso) if iso else None
