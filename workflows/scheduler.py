"""`gyre.Scheduler`: the entity that gives every cell of a pool its desired state.

It states what should be, never what to do: cells reconcile, and a lost, repeated or reordered signal changes
nothing. A lost cell is left out of what the policy sees until it is back, and a step hears at once when a cell that
trains it is taken away. One run at a time leases the pool. The counts of episodes stay in Redis; `watch_demand` wakes
the scheduler only when its policy would decide something else, so history grows with decisions.
"""

from __future__ import annotations

import asyncio
from statistics import median

from pydantic import BaseModel
from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from workflows import activity_calls, names
    from workflows.contracts.configuration import SchedulerConfig
    from workflows.contracts.orders import (
        CellLost,
        Decided,
        Desired,
        LeaseRequest,
        StepClosed,
        StepOpened,
        StepProgress,
        Switched,
        TrainerGone,
    )
    from workflows.contracts.results import ResizeRequest
    from workflows.scheduling.policies import decide
    from workflows.scheduling.pool_view import Assignment, CellView, Decision, PoolView, StepView
    from workflows.signals import tell

KEPT_SWITCHES = 8
"""Role switches of each direction whose median stands for the next one's cost."""
KEPT_DECISIONS = 32
LEASE_LOOK_S = 60
"""Seconds between looks at the run that holds the pool, while others wait for it."""


class OpenStep(BaseModel):
    opened: StepOpened
    ready: int = 0
    ready_tokens: int = 0


class SchedulerState(BaseModel):
    """Everything that the scheduler knows; carried whole across continue-as-new."""

    pool: str
    cells: list[str]
    capacity: int
    epoch: int = 0
    lease: LeaseRequest | None = None
    waiting: list[LeaseRequest] = []
    steps: list[OpenStep] = []
    version: int = 0
    candidate_ref: str = ""
    desired: dict[str, Desired] = {}
    lost: dict[str, str] = {}
    """Cell of the pool that does not answer -> why it counts as lost."""
    tokens_per_s: float = 5000.0
    rollout_tokens_per_s: float = 0.0
    switches_out_s: list[float] = []
    """Seconds of the last switches out of rollout, of whichever cell."""
    switches_in_s: list[float] = []
    recent: list[Decided] = []
    """The last decisions, newest last."""
    reason: str = "no run has leased the pool"
    decisions: int = 0
    held: bool = False
    """No cell serves: running calls are held by the proxy, until the run that holds the pool lets go."""
    history_limit: int = 4000
    """Events after which the workflow continues as new."""


@workflow.defn(name="gyre.Scheduler")
class Scheduler:
    @workflow.init
    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.changed = True

    @workflow.run
    async def run(self, state: SchedulerState) -> None:
        minding = asyncio.create_task(self._mind_lease())
        while workflow.info().get_current_history_length() < self.state.history_limit:
            self.changed = False
            self._describe()
            if not self.state.lease or not any(step.opened.train for step in self.state.steps):
                await self._apply(decide(self._view()))
                await workflow.wait_condition(lambda: self.changed)
                continue
            await self._follow_demand()
        minding.cancel()
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new(self.state)

    async def _follow_demand(self) -> None:
        """Wait for another decision; what else has changed (the version, a pause) holds for the standing one."""
        await self._apply(self._standing())
        watch = activity_calls.watch_demand(self._view())
        await workflow.wait_condition(lambda: self.changed or watch.done())
        if not watch.done():
            activity_calls.abandon(watch)
            return
        try:
            decision = await watch
        except ActivityError as error:  # its retries are unlimited: only a cancelled server task ends up here
            workflow.logger.warning("watch_demand ended: %s", error)
            await asyncio.sleep(1)
            return
        if not self.changed:  # decided on a view that still holds
            self.state.decisions += 1
            self.state.reason = decision.reason
            await self._apply(decision)
            self._remember(decision)

    @workflow.signal(description="A run asks for the pool's cells")
    async def request_lease(self, request: LeaseRequest) -> None:
        state = self.state
        if state.lease is not None and state.lease.run != request.run:
            if all(other.run != request.run for other in state.waiting):
                state.waiting.append(request)
            return
        if state.lease is None:
            self._grant(request)
        if not await self._tell_run(request.run):
            await self._release(request.run)

    @workflow.signal(description="A run gives the pool back")
    async def release_lease(self, run: str) -> None:
        self.state.waiting = [request for request in self.state.waiting if request.run != run]
        await self._release(run)

    async def _release(self, run: str) -> None:
        """The lease passes to the first run that waits for it and still hears of it."""
        state = self.state
        if not self._leased_to(run):
            return
        state.lease, state.steps = None, []
        self.changed = True
        while state.waiting and state.lease is None:
            request = state.waiting.pop(0)
            self._grant(request)
            if not await self._tell_run(request.run) and self._leased_to(request.run):
                state.lease = None

    async def _mind_lease(self) -> None:
        """A run that was terminated gives nothing back: while others wait, the one that holds the pool is looked at."""
        state = self.state
        while True:
            await workflow.wait_condition(lambda: bool(state.lease and state.waiting))
            holder = state.lease.run if state.lease else ""
            try:
                status = await activity_calls.run_status(holder)
            except ActivityError as error:
                workflow.logger.warning("the run %s, which holds the pool, cannot be looked at: %s", holder, error)
                status = "RUNNING"
            if status != "RUNNING":
                workflow.logger.warning("the run %s has the pool and is %s: it passes on", holder, status)
                await self._release(holder)
            else:
                await workflow.sleep(LEASE_LOOK_S)

    @workflow.signal(description="Hold (or let go) the calls of the leasing run's episodes")
    def hold_calls(self, run: str, held: bool) -> None:
        if self._leased_to(run):
            self.state.held = held
            self.changed = True

    @workflow.signal
    def step_opened(self, opened: StepOpened) -> None:
        if self._leased_to(opened.run) and all(step.opened.step != opened.step for step in self.state.steps):
            self.state.steps = sorted([*self.state.steps, OpenStep(opened=opened)], key=lambda s: s.opened.step)
            self.changed = True

    @workflow.signal
    def step_progress(self, progress: StepProgress) -> None:
        for step in self.state.steps:
            if self._leased_to(progress.run) and step.opened.step == progress.step:
                step.ready, step.ready_tokens = progress.ready, progress.ready_tokens
                self.state.tokens_per_s = progress.tokens_per_s or self.state.tokens_per_s
                self.state.rollout_tokens_per_s = progress.rollout_tokens_per_s or self.state.rollout_tokens_per_s
                self.changed = True

    @workflow.signal
    def step_closed(self, closed: StepClosed) -> None:
        if not self._leased_to(closed.run):
            return
        self.state.steps = [step for step in self.state.steps if step.opened.step != closed.step]
        if closed.version >= self.state.version and closed.candidate_ref:
            self.state.version, self.state.candidate_ref = closed.version, closed.candidate_ref
        self.changed = True

    @workflow.signal(description="A cell has changed its role: what it took is what the next switch should cost")
    def switched(self, switch: Switched) -> None:
        state = self.state
        if switch.to == "train":
            state.switches_out_s = [*state.switches_out_s, switch.seconds][-KEPT_SWITCHES:]
        elif switch.to == "rollout":
            state.switches_in_s = [*state.switches_in_s, switch.seconds][-KEPT_SWITCHES:]

    @workflow.update(description="Set the cells of the pool")
    async def resize(self, request: ResizeRequest) -> list[str]:
        """A cell that is left out moves its calls; what it has summed of an open step is trained again elsewhere."""
        gone = [cell for cell in self.state.cells if cell not in request.cells]
        self.state.cells = list(request.cells)
        self.changed = True
        for cell in gone:
            self.state.lost.pop(cell, None)
            await self._dismiss(cell, "left the pool")
        return list(request.cells)

    @workflow.signal(description="A cell does not answer: others get its roles until it is back")
    async def cell_lost(self, lost: CellLost) -> None:
        if lost.cell in self.state.cells:
            self.state.lost[lost.cell] = lost.reason
            self.changed = True
            await self._dismiss(lost.cell, f"lost: {lost.reason}")

    @workflow.signal(description="All parts of a cell answer (again)")
    def cell_back(self, cell: str) -> None:
        if cell in self.state.cells:
            self.state.lost.pop(cell, None)
            self.state.desired.pop(cell, None)  # whatever it was told, it is told again
            self.changed = True

    @resize.validator
    def _check_resize(self, request: ResizeRequest) -> None:
        if not request.cells or len(set(request.cells)) != len(request.cells):
            raise ValueError("resize needs at least one cell, each named once")
        if all(cell in self.state.lost for cell in request.cells):
            raise ValueError("none of these cells answers: a pool needs at least one that does")

    @workflow.query(description="Cells, steps and the last decision with its reason")
    def status(self) -> SchedulerState:
        return self.state

    def _grant(self, request: LeaseRequest) -> None:
        self.state.lease = request
        self.state.version, self.state.candidate_ref = request.version, request.candidate_ref
        self.state.steps, self.state.held = [], False
        self.changed = True

    def _leased_to(self, run: str) -> bool:
        return self.state.lease is not None and self.state.lease.run == run

    def _told(self, cell: str) -> Assignment:
        """What the cell has been told last."""
        desired = self.state.desired.get(cell)
        if desired is None or desired.role != "train":
            return Assignment()
        return Assignment(step=desired.step, core=desired.core)

    def _standing(self) -> Decision:
        """The roles that the cells were told last."""
        return Decision(assignments={cell: self._told(cell) for cell in self.state.cells}, reason=self.state.reason)

    def _view(self) -> PoolView:
        """What the policy looks at; `watch_demand` fills in the counts of unfinished episodes."""
        state = self.state
        roles = {cell: self._told(cell) for cell in state.cells if cell not in state.lost}
        steps = [
            StepView(
                step=step.opened.step,
                train=step.opened.train,
                unfinished=step.opened.episodes,
                total=step.opened.episodes,
                ready=step.ready,
                ready_tokens=step.ready_tokens,
            )
            for step in state.steps
        ]
        scheduler = state.lease.scheduler if state.lease else SchedulerConfig()
        return PoolView(
            run=state.lease.run if state.lease else "",
            cells=[CellView(cell=cell, training_step=role.step, core=role.core) for cell, role in roles.items()],
            steps=steps,
            capacity=state.capacity,
            scheduler=scheduler,
            tokens_per_s=state.tokens_per_s,
            rollout_tokens_per_s=state.rollout_tokens_per_s,
            switch_out_s=median(state.switches_out_s) if state.switches_out_s else None,
            switch_in_s=median(state.switches_in_s) if state.switches_in_s else None,
            solo_speedup=scheduler.solo_speedup,
        )

    def _remember(self, decision: Decision) -> None:
        state = self.state
        roles = {cell: "lost" if cell in state.lost else _show(state.desired.get(cell)) for cell in state.cells}
        decided = Decided(at=workflow.now().isoformat(timespec="milliseconds"), reason=decision.reason, roles=roles)
        state.recent = [*state.recent, decided][-KEPT_DECISIONS:]

    async def _apply(self, decision: Decision) -> None:
        """Signal every cell whose desired state differs from what it was told last."""
        state = self.state
        for cell in state.cells:
            if cell in state.lost or cell not in state.cells:  # signals and updates come in between
                continue
            wanted = self._desired(decision.assignments.get(cell, Assignment()), decision.reason)
            told = state.desired.get(cell)
            if told is not None and _same(told, wanted):
                continue
            state.epoch += 1
            desired = state.desired[cell] = wanted.model_copy(update={"epoch": state.epoch})
            await self._take_from_step(cell, told, desired)
            await self._tell_cell(cell, desired)
        self._describe()

    async def _dismiss(self, cell: str, reason: str) -> None:
        """The cell is not to be used any more: it closes its route, as soon as it can."""
        state = self.state
        told = state.desired.pop(cell, None)
        state.epoch += 1
        drain_s = state.lease.scheduler.drain_s if state.lease else 0.0
        idle = Desired(epoch=state.epoch, role="idle", reason=reason, pool=state.pool, drain_s=drain_s)
        await self._take_from_step(cell, told, idle)
        await self._tell_cell(cell, idle)
        self._describe()

    async def _take_from_step(self, cell: str, told: Desired | None, now: Desired) -> None:
        """Tell the open step that the cell has trained, if it doesn't go on with it."""
        if told is None or told.role != "train" or told.context is None or (now.role, now.step) == ("train", told.step):
            return
        if all(step.opened.step != told.step for step in self.state.steps):
            return
        gone = TrainerGone(cell=cell, epoch=now.epoch, reason=now.reason)
        await tell(names.step_id(told.context.run, told.step), "trainer_gone", gone)

    def _desired(self, assignment: Assignment, reason: str) -> Desired:
        state, lease = self.state, self.state.lease
        if lease is None:
            return Desired(epoch=0, role="idle", reason="no run has leased the pool")
        if state.held and assignment.step < 0:
            return Desired(epoch=0, role="idle", reason="the run is paused and holds its calls")
        return Desired(
            epoch=0,
            role="train" if assignment.step >= 0 else "rollout",
            step=assignment.step,
            core=assignment.core,
            version=state.version,
            candidate_ref=state.candidate_ref,
            context=lease.context,
            reason=reason,
            pool=state.pool,
            **lease.scheduler.waits,
        )

    async def _tell_cell(self, cell: str, desired: Desired) -> None:
        if not await tell(names.cell_id(cell), "set_desired", desired) and cell in self.state.cells:
            self.state.lost[cell] = f"its workflow {names.cell_id(cell)} does not run; `gyre up` starts it"
            self.state.desired.pop(cell, None)
            self.changed = True

    async def _tell_run(self, run: str) -> bool:
        """False when there is no such run any more."""
        return await tell(names.run_id(run), "lease_granted", self.state.pool)

    def _describe(self) -> None:
        state = self.state
        lines = [f"**pool {state.pool}** · leased to {state.lease.run if state.lease else 'nobody'}", ""]
        lines += [
            f"- {cell}: " + (f"**lost**, {state.lost[cell]}" if cell in state.lost else _show(state.desired.get(cell)))
            for cell in state.cells
        ]
        lines += [f"- step {s.opened.step}: {s.opened.episodes} episodes, {s.ready} ready" for s in state.steps]
        lines += ["", f"Last decision: {state.reason}"]
        workflow.set_current_details("\n".join(lines))


def _same(told: Desired, wanted: Desired) -> bool:
    ignored = {"epoch", "reason", "fence", "drain_s", "update_wait_s", "lost_s"}
    if told.role == wanted.role == "train" and told.step == wanted.step and told.core == wanted.core:
        return True  # a step keeps its trainers on the version that it trains
    return told.model_dump(exclude=ignored) == wanted.model_dump(exclude=ignored)


def _show(desired: Desired | None) -> str:
    if desired is None or desired.role == "idle":
        return "idle"
    if desired.role == "rollout":
        return f"serves version {desired.version}"
    return f"{'core' if desired.core else 'satellite'} of step {desired.step}"
