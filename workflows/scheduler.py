"""`gyre.Scheduler`: the entity that gives every cell of a pool its desired state.

It states what should be, never what to do: cells reconcile, and a lost, repeated or reordered signal changes
nothing. One run at a time leases the pool. The counts of episodes stay in Redis; `watch_demand` wakes the
scheduler only when its policy would decide something else, so history grows with decisions.
"""

from __future__ import annotations

import asyncio

from pydantic import BaseModel
from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from workflows import calls, names
    from workflows.configuration import SchedulerConfig
    from workflows.contracts import ResizeRequest
    from workflows.orders import Desired, LeaseRequest, StepClosed, StepOpened, StepProgress
    from workflows.policies import Assignment, CellView, Decision, PoolView, StepView, decide


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
    tokens_per_s: float = 5000.0
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
        while workflow.info().get_current_history_length() < self.state.history_limit:
            self.changed = False
            self._describe()
            if not self.state.lease or not any(step.opened.train for step in self.state.steps):
                await self._apply(decide(self._view()))
                await workflow.wait_condition(lambda: self.changed)
                continue
            await self._follow_demand()
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new(self.state)

    async def _follow_demand(self) -> None:
        """Wait for another decision; what else has changed (the version, a pause) holds for the standing one."""
        await self._apply(self._standing())
        watch = calls.watch_demand(self._view())
        await workflow.wait_condition(lambda: self.changed or watch.done())
        if not watch.done():
            calls.abandon(watch)
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

    @workflow.signal(description="A run asks for the pool's cells")
    async def request_lease(self, request: LeaseRequest) -> None:
        state = self.state
        if state.lease is not None and state.lease.run != request.run:
            if all(other.run != request.run for other in state.waiting):
                state.waiting.append(request)
            return
        if state.lease is None:
            self._grant(request)
        await self._tell_run(request.run)

    @workflow.signal(description="A run gives the pool back")
    async def release_lease(self, run: str) -> None:
        state = self.state
        state.waiting = [request for request in state.waiting if request.run != run]
        if state.lease is None or state.lease.run != run:
            return
        state.lease, state.steps = None, []
        self.changed = True
        if state.waiting:
            request = state.waiting.pop(0)
            self._grant(request)
            await self._tell_run(request.run)

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
                self.changed = True

    @workflow.signal
    def step_closed(self, closed: StepClosed) -> None:
        if not self._leased_to(closed.run):
            return
        self.state.steps = [step for step in self.state.steps if step.opened.step != closed.step]
        if closed.version >= self.state.version and closed.candidate_ref:
            self.state.version, self.state.candidate_ref = closed.version, closed.candidate_ref
        self.changed = True

    @workflow.update(description="Set the cells of the pool")
    async def resize(self, request: ResizeRequest) -> list[str]:
        gone = [cell for cell in self.state.cells if cell not in request.cells]
        for cell in gone:
            self.state.epoch += 1
            await self._tell_cell(cell, Desired(epoch=self.state.epoch, role="idle", reason="left the pool"))
            self.state.desired.pop(cell, None)
        self.state.cells = list(request.cells)
        self.changed = True
        return self.state.cells

    @resize.validator
    def _check_resize(self, request: ResizeRequest) -> None:
        if not request.cells or len(set(request.cells)) != len(request.cells):
            raise ValueError("resize needs at least one cell, each named once")

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

    def _standing(self) -> Decision:
        """The roles that the cells were told last."""
        told = {cell: self.state.desired.get(cell) for cell in self.state.cells}
        assignments = {
            cell: Assignment(step=desired.step, core=desired.core)
            if desired and desired.role == "train"
            else Assignment()
            for cell, desired in told.items()
        }
        return Decision(assignments=assignments, reason=self.state.reason)

    def _view(self) -> PoolView:
        """What the policy looks at; `watch_demand` fills in the counts of unfinished episodes."""
        state = self.state
        cells = []
        for cell in state.cells:
            desired = state.desired.get(cell)
            training = desired is not None and desired.role == "train"
            cells.append(
                CellView(
                    cell=cell,
                    training_step=desired.step if desired is not None and training else -1,
                    core=desired is not None and desired.core,
                )
            )
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
        lease = state.lease
        return PoolView(
            run=lease.run if lease else "",
            cells=cells,
            steps=steps,
            capacity=state.capacity,
            scheduler=lease.scheduler if lease else SchedulerConfig(),
            tokens_per_s=state.tokens_per_s,
        )

    async def _apply(self, decision: Decision) -> None:
        """Signal every cell whose desired state differs from what it was told last."""
        state = self.state
        for cell in state.cells:
            wanted = self._desired(decision.assignments.get(cell, Assignment()), decision.reason)
            told = state.desired.get(cell)
            if told is not None and _same(told, wanted):
                continue
            state.epoch += 1
            state.desired[cell] = wanted.model_copy(update={"epoch": state.epoch})
            await self._tell_cell(cell, state.desired[cell])
        self._describe()

    def _desired(self, assignment: Assignment, reason: str) -> Desired:
        state = self.state
        if state.lease is None:
            return Desired(epoch=0, role="idle", reason="no run has leased the pool")
        if state.held and assignment.step < 0:
            return Desired(epoch=0, role="idle", reason="the run is paused and holds its calls")
        return Desired(
            epoch=0,
            role="train" if assignment.step >= 0 else "rollout",
            step=assignment.step,
            version=state.version,
            candidate_ref=state.candidate_ref,
            core=assignment.core,
            context=state.lease.context,
            reason=reason,
        )

    async def _tell_cell(self, cell: str, desired: Desired) -> None:
        await workflow.get_external_workflow_handle(names.cell_id(cell)).signal("set_desired", desired)

    async def _tell_run(self, run: str) -> None:
        await workflow.get_external_workflow_handle(names.run_id(run)).signal("lease_granted", self.state.pool)

    def _describe(self) -> None:
        state = self.state
        lines = [f"**pool {state.pool}** · leased to {state.lease.run if state.lease else 'nobody'}", ""]
        lines += [f"- {cell}: {_show(state.desired.get(cell))}" for cell in state.cells]
        lines += [f"- step {s.opened.step}: {s.opened.episodes} episodes, {s.ready} ready" for s in state.steps]
        lines += ["", f"Last decision: {state.reason}"]
        workflow.set_current_details("\n".join(lines))


def _same(told: Desired, wanted: Desired) -> bool:
    ignored = {"epoch", "reason", "fence"}
    if told.role == wanted.role == "train" and told.step == wanted.step and told.core == wanted.core:
        return True  # a step keeps its trainers on the version that it trains
    return told.model_dump(exclude=ignored) == wanted.model_dump(exclude=ignored)


def _show(desired: Desired | None) -> str:
    if desired is None or desired.role == "idle":
        return "idle"
    if desired.role == "rollout":
        return f"serves version {desired.version}"
    return f"{'core' if desired.core else 'satellite'} of step {desired.step}"
