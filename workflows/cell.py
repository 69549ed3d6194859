"""`gyre.Cell`: the entity that brings one cell into the state that the scheduler desires, until it holds.

It compares what is with what should be, and repeats. A desired state with an older epoch is dropped. When the
cell's engine or replica turns out to be another process than the one that was prepared, the cell is prepared again.

A part of the cell that is silent is given `Desired.lost_s` seconds; then the cell is lost. The scheduler is told, the
route stays closed, nothing is ordered, and the cell waits until all its parts answer; the scheduler hears that too.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from temporalio import exceptions, workflow
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from workflows import activity_calls, names
    from workflows.contracts.configuration import shared
    from workflows.contracts.orders import (
        CellFacts,
        CellLost,
        CellOrder,
        CellReport,
        CellStatus,
        Desired,
        DrainInput,
        ReachCellInput,
        Switched,
        TrainerReady,
        WatchCellInput,
    )
    from workflows.group import cause_of
    from workflows.signals import tell

BACKOFF_S = (1, 2, 5, 10)
HOPELESS = 8
"""Failures in a row after which a cell that answers, but cannot be brought into the desired state, counts as lost."""
RETURN_S = (0, 5, 10, 30)
"""Seconds before a cell that was lost is asked again, by how often in a row it was lost."""


class CellState(CellFacts):
    """Everything that the cell knows; carried whole across continue-as-new."""

    desired: Desired = Desired(epoch=0, role="idle")
    role: str = "idle"
    """The one that it is in."""
    switches: int = 0
    history_limit: int = 4000
    """Events after which the workflow continues as new."""
    pool: str = ""
    """Pool whose scheduler hears that the cell is here, when its workflow starts; empty: nobody."""
    suspect: bool = False
    """A part was silent or an order failed: all parts must answer before the next order."""
    losses: int = 0
    """How often in a row it was lost without having held a role in between."""


@workflow.defn(name="gyre.Cell")
class Cell:
    @workflow.init
    def __init__(self, state: CellState) -> None:
        self.state = state

    @workflow.run
    async def run(self, state: CellState) -> None:
        if self.state.pool:  # a scheduler that looked for this workflow in vain counts the cell as lost
            pool, self.state.pool = self.state.pool, ""
            await tell(names.scheduler_id(pool), "cell_back", self.state.cell)
        while workflow.info().get_current_history_length() < self.state.history_limit:
            self._describe()
            if self.state.lost:
                await self._await_return()
            elif not self.state.holds:
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
            self.state.wanted_at = workflow.now().isoformat()

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
            **shared(state, CellFacts),
            **{name: getattr(state.desired, name) for name in ("role", "step", "epoch", "reason")},
            actual=state.role,
        )

    async def _reconcile(self) -> None:
        state, desired = self.state, self.state.desired
        started = workflow.now()
        try:
            if not await self._drain(desired):
                return
            if state.suspect and desired.role != "idle" and await self._reach(desired) is None:
                return
            report = await self._enter(desired)
        except (ActivityError, ApplicationError) as error:
            state.error = cause_of(error) if isinstance(error, ActivityError) else str(error)
            state.failures += 1
            state.suspect = True
            if state.failures >= HOPELESS:
                await self._lose(f"cannot become {desired.role}: {state.error}")
                return
            self._describe()
            wait = timedelta(seconds=BACKOFF_S[min(state.failures, len(BACKOFF_S)) - 1])
            state.again_at = (workflow.now() + wait).isoformat()
            try:
                await workflow.wait_condition(lambda: state.desired is not desired, timeout=wait)
            except TimeoutError:
                workflow.logger.warning("%s tries again: %s", state.cell, state.error)
            state.again_at = ""
            return
        state.error, state.failures, state.suspect = "", 0, False
        if desired.role != "idle":
            state.losses = 0
        # A cell that starts has more to do than one that switches.
        switched = state.role != desired.role and "idle" not in (state.role, desired.role)
        if state.role != desired.role:
            state.switches += 1
            state.last_switch_s = (workflow.now() - started).total_seconds()
        state.engine, state.replica = report.engine, report.replica
        state.role, state.version = desired.role, desired.version
        state.holds = state.desired is desired
        state.reached_at = workflow.now().isoformat()
        if switched and desired.pool:
            await tell(
                names.scheduler_id(desired.pool),
                "switched",
                Switched(cell=state.cell, to=desired.role, seconds=state.last_switch_s),
            )

    async def _drain(self, desired: Desired) -> bool:
        """Until no call runs on the cell; False when another state is desired before that."""
        state = self.state
        update = state.role == desired.role == "rollout" and state.version != desired.version
        patience = desired.update_wait_s if update else desired.drain_s
        if state.suspect:  # nothing ends by itself on a cell that may be dead
            patience = 0.0
        drain = activity_calls.drain_cell(DrainInput(cell=state.cell, epoch=desired.epoch, drain_s=patience))
        if patience:
            state.draining_s = patience
            self._describe()
            await workflow.wait_condition(lambda: drain.done() or state.desired is not desired)
            state.draining_s = None
            if not drain.done():  # the new state may be more urgent, and its drain goes on where this one was
                activity_calls.abandon(drain)
                return False
        state.last_drain = await drain
        if update and patience and state.last_drain.moved:
            workflow.logger.warning("%s: %d calls outlasted an update", state.cell, state.last_drain.moved)
        return True

    async def _enter(self, desired: Desired) -> CellReport:
        state = self.state
        order = CellOrder(cell=state.cell, desired=desired)
        if desired.role == "rollout":
            return await activity_calls.serve_rollout(order)
        if desired.role == "idle":
            return CellReport(engine=state.engine, replica=state.replica)
        report = await activity_calls.prepare_training(order)
        ready = TrainerReady(
            cell=state.cell,
            incarnation=report.replica,
            epoch=desired.epoch,
            core=desired.core,
            running=report.running,
        )
        await tell(names.step_id(desired.of_run.run, desired.step), "trainer_ready", ready)
        return report  # where the step is over, the scheduler's next desired state is on its way

    async def _watch(self) -> None:
        state = self.state
        watch = activity_calls.watch_cell(
            WatchCellInput(
                cell=state.cell,
                engine=state.engine,
                replica=state.replica,
                needs_engine=state.role == "rollout",
            ),
            state.desired.lost_s,
        )
        await workflow.wait_condition(lambda: not state.holds or watch.done())
        if not watch.done():
            activity_calls.abandon(watch)
            return
        try:
            report: CellReport | None = await watch
        except ActivityError as error:  # its worker is silent; what it watched may be as it was
            state.error = cause_of(error)
            self._describe()
            report = await self._reach(state.desired)
        if report is None:
            return
        same = (report.engine or state.engine, report.replica or state.replica) == (state.engine, state.replica)
        if same and not report.missing:
            state.error = ""
            return
        state.engine, state.replica = report.engine, report.replica
        state.suspect, state.holds = bool(report.missing), False

    async def _reach(self, desired: Desired) -> CellReport | None:
        """What answers, once all does that the desired role needs. None: the cell is lost, or is to be another."""
        state = self.state
        reach = ReachCellInput(cell=state.cell, needs_engine=desired.role != "train")
        try:
            report = await activity_calls.reach_cell(reach, desired.lost_s)
        except ActivityError as error:
            await self._lose(f"{_silent(error)} has not answered for {desired.lost_s:.0f} s")
            return None
        return report if state.desired is desired else None

    async def _lose(self, reason: str) -> None:
        state = self.state
        state.lost, state.losses, state.failures = reason, state.losses + 1, 0
        state.role, state.version, state.holds, state.suspect = "idle", -1, False, True
        self._describe()
        if state.desired.pool:
            await tell(names.scheduler_id(state.desired.pool), "cell_lost", CellLost(cell=state.cell, reason=reason))

    async def _await_return(self) -> None:
        """Lost: the route stays closed, whatever is desired, until every part answers."""
        state = self.state
        last_told = state.desired
        if wait := RETURN_S[min(state.losses, len(RETURN_S)) - 1]:
            await workflow.sleep(wait)
        reach = activity_calls.reach_cell(ReachCellInput(cell=state.cell, needs_engine=True), None)
        while not reach.done():
            desired = state.desired
            drain = activity_calls.drain_cell(DrainInput(cell=state.cell, epoch=desired.epoch))
            if desired is not last_told and desired.role != "idle" and desired.pool:  # it doesn't know, or no longer
                lost = CellLost(cell=state.cell, reason=state.lost)
                await tell(names.scheduler_id(desired.pool), "cell_lost", lost)
            await workflow.wait_condition(partial(self._returns_or_changes, reach, desired))
            activity_calls.abandon(drain)
        try:
            await reach
        except ActivityError as error:
            workflow.logger.warning("%s is waited for anew: %s", state.cell, cause_of(error))
            return
        state.lost, state.error, state.suspect = "", "", False
        pool = state.desired.pool or last_told.pool
        if pool:
            await tell(names.scheduler_id(pool), "cell_back", state.cell)

    def _returns_or_changes(self, reach: workflow.ActivityHandle[CellReport], desired: Desired) -> bool:
        return reach.done() or self.state.desired is not desired

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
        if state.last_drain is not None:
            drain = state.last_drain
            lines.append(f"- last drain: {drain.seconds:.2f} s, {drain.ended} calls ended, {drain.moved} were moved")
        if state.draining_s is not None:
            lines.append(f"- draining: calls that run may end within {state.draining_s:.0f} s")
        if state.lost:
            lines.append(f"- **lost**: {state.lost}; it is used again once all its parts answer")
        if state.error:
            lines.append(f"- **failing** ({state.failures}): {state.error}")
        workflow.set_current_details("\n".join(lines))


def _silent(error: ActivityError) -> str:
    """The parts of a cell that did not answer, as far as its worker could tell."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, exceptions.TimeoutError) and cause.last_heartbeat_details:
            return f"its {cause.last_heartbeat_details[0]}"
        cause = cause.__cause__
    return "its worker"
