"""`gyre.Cell`: the entity that brings one cell into the state that the scheduler desires, until it holds.

It compares what is with what should be, and repeats. A desired state with an older epoch is dropped. When the
cell's engine or replica turns out to be another process than the one that was prepared, the cell is prepared again.
"""

from __future__ import annotations

from datetime import timedelta

from pydantic import BaseModel
from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from workflows import calls, names
    from workflows.group import cause_of
    from workflows.orders import CellOrder, CellReport, CellStatus, Desired, DrainInput, TrainerReady, WatchCellInput

BACKOFF_S = (1, 2, 5, 10)


class CellState(BaseModel):
    """Everything that the cell knows; carried whole across continue-as-new."""

    cell: str
    desired: Desired = Desired(epoch=0, role="idle")
    holds: bool = True
    """The desired state has been reached, as far as is known."""
    engine: str = ""
    replica: str = ""
    role: str = "idle"
    version: int = -1
    failures: int = 0
    error: str = ""
    switches: int = 0
    history_limit: int = 4000
    """Events after which the workflow continues as new."""
    last_switch_s: float = 0.0


@workflow.defn(name="gyre.Cell")
class Cell:
    @workflow.init
    def __init__(self, state: CellState) -> None:
        self.state = state

    @workflow.run
    async def run(self, state: CellState) -> None:
        while workflow.info().get_current_history_length() < self.state.history_limit:
            self._describe()
            if not self.state.holds:
                await self._reconcile()
            elif self.state.role == "idle":
                await workflow.wait_condition(lambda: not self.state.holds)
            else:
                await self._watch()
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new(self.state)

    @workflow.signal(description="The scheduler's desired state; older epochs are dropped")
    def set_desired(self, desired: Desired) -> None:
        if desired.epoch > self.state.desired.epoch:
            self.state.desired = desired
            self.state.holds = False

    @workflow.signal(description="A step has declared an incarnation of the replica lost")
    def fence(self, incarnation: str) -> None:
        state = self.state
        if state.desired.role == "train" and state.replica == incarnation:
            state.desired = state.desired.model_copy(update={"fence": incarnation})
            state.holds = False

    @workflow.query(description="Role, version and incarnations of the cell")
    def status(self) -> CellStatus:
        state = self.state
        return CellStatus(
            cell=state.cell,
            role=state.desired.role,
            step=state.desired.step,
            version=state.version,
            epoch=state.desired.epoch,
            engine=state.engine,
            replica=state.replica,
            error=state.error,
            last_switch_s=state.last_switch_s,
        )

    async def _reconcile(self) -> None:
        state, desired = self.state, self.state.desired
        started = workflow.now()
        try:
            await calls.drain_cell(DrainInput(cell=state.cell, epoch=desired.epoch))
            report = await self._enter(desired)
        except (ActivityError, ApplicationError) as error:
            state.error = cause_of(error) if isinstance(error, ActivityError) else str(error)
            state.failures += 1
            self._describe()
            wait = timedelta(seconds=BACKOFF_S[min(state.failures, len(BACKOFF_S)) - 1])
            try:
                await workflow.wait_condition(lambda: state.desired is not desired, timeout=wait)
            except TimeoutError:
                workflow.logger.warning("%s tries again: %s", state.cell, state.error)
            return
        state.error, state.failures = "", 0
        if state.role != desired.role:
            state.switches += 1
            state.last_switch_s = (workflow.now() - started).total_seconds()
        state.engine, state.replica = report.engine, report.replica
        state.role, state.version = desired.role, desired.version
        state.holds = state.desired is desired

    async def _enter(self, desired: Desired) -> CellReport:
        state = self.state
        order = CellOrder(cell=state.cell, desired=desired)
        if desired.role == "rollout":
            return await calls.serve_rollout(order)
        if desired.role == "idle":
            return CellReport(engine=state.engine, replica=state.replica)
        report = await calls.prepare_training(order)
        if desired.context is None:
            raise ApplicationError("a cell cannot train without the context of a run", non_retryable=True)
        ready = TrainerReady(
            cell=state.cell,
            incarnation=report.replica,
            epoch=desired.epoch,
            core=desired.core,
            running=report.running,
        )
        step = workflow.get_external_workflow_handle(names.step_id(desired.context.run, desired.step))
        try:
            await step.signal("trainer_ready", ready)
        except ApplicationError as error:  # the step is over: the scheduler's next desired state is on its way
            workflow.logger.info("step %s no longer takes trainers: %s", desired.step, error)
        return report

    async def _watch(self) -> None:
        state = self.state
        watch = calls.watch_cell(WatchCellInput(cell=state.cell, engine=state.engine, replica=state.replica))
        await workflow.wait_condition(lambda: not state.holds or watch.done())
        if not watch.done():
            calls.abandon(watch)
            return
        try:
            report = await watch
        except ActivityError as error:
            state.error = cause_of(error)
        else:
            state.engine, state.replica = report.engine, report.replica
        state.holds = False

    def _describe(self) -> None:
        state = self.state
        phase = "holds" if state.holds else f"moving to {state.desired.role}"
        lines = [
            f"**{state.cell}** · {state.role}, version {state.version} · {phase}",
            f"- desired: {state.desired.role}, step {state.desired.step}, version {state.desired.version}, "
            f"epoch {state.desired.epoch}",
            f"- why: {state.desired.reason}",
            f"- role switches: {state.switches}, the last took {state.last_switch_s:.2f} s",
        ]
        if state.error:
            lines.append(f"- **failing** ({state.failures}): {state.error}")
        workflow.set_current_details("\n".join(lines))
