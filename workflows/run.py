"""`gyre.Run`: a training job over days. It alone allocates steps.

Step k (by version) opens when k − trained_version ≤ max_staleness. An evaluation is a step too; it is due before the
first update and after every n, and no later version is trained until it has ended, so that it measures exactly one
version. Continue-as-new carries one complete state; steps live on (parent-close policy ABANDON) and report by
signal, and a step that ended silently is found by describing it.
"""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta

from pydantic import BaseModel
from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows import activity_calls, names
    from workflows.contracts.configuration import RunConfig
    from workflows.contracts.orders import LeaseRequest, RunContext, StepFinished
    from workflows.contracts.results import PauseRequest, RunFacts, RunStatus, StepInput, StepResult, SubmitStep
    from workflows.signals import heed_cancellation, tell
    from workflows.step import Step

RECONCILE = timedelta(seconds=60)
ASK_AGAIN, ASK_AGAIN_AT_LAST = timedelta(seconds=60), timedelta(hours=1)
"""How long a run waits for the pool before it asks again: at first, and at most."""
KEPT_RESULTS = 512
KEPT_REQUESTS = 256


class OpenedStep(BaseModel):
    version: int
    train: bool


class RunState(BaseModel):
    """Everything that the run knows; carried whole across continue-as-new."""

    config: RunConfig
    pool: str
    facts: RunFacts | None = None
    leased: bool = False
    paused: bool = False
    hold: bool = False
    trained_version: int = 0
    candidate_ref: str = ""
    next_step: int = 0
    next_version: int = 0
    """Version that the next training step will train."""
    evaluated: list[int] = []
    """Versions whose scheduled evaluation has been opened."""
    submitted: list[SubmitStep] = []
    extra_tasks: int = 0
    open_steps: dict[int, OpenedStep] = {}
    results: list[StepResult] = []
    handled: list[str] = []
    """Ids of requests that were handled: update ids are forgotten across continue-as-new."""
    failure: str = ""
    history_limit: int = 4000
    """Events after which the workflow continues as new."""


class RunOutcome(BaseModel):
    run: str
    version: int
    candidate_ref: str
    curve: list[tuple[int, float]]
    """(version, pass rate on the held-out tasks) of every evaluation."""


@workflow.defn(name="gyre.Run")
class Run:
    @workflow.init
    def __init__(self, state: RunState) -> None:
        self.state = state

    @workflow.run
    async def run(self, state: RunState) -> RunOutcome:
        workflow.upsert_search_attributes(
            [names.GYRE_RUN.value_set(state.config.name), names.GYRE_PHASE.value_set("running")]
        )
        try:
            await self._begin()
            await self._loop()
        except (asyncio.CancelledError, Exception) as error:  # not continue-as-new: the run then keeps its cells
            if is_cancelled_exception(error):
                await self._cancel_steps()
            await self._release()
            raise
        await self._release()
        workflow.upsert_search_attributes([names.GYRE_PHASE.value_set("done")])
        self._describe()
        return RunOutcome(
            run=state.config.name,
            version=state.trained_version,
            candidate_ref=state.candidate_ref,
            curve=[(result.version, result.pass_rate) for result in state.results if not result.train],
        )

    # --- messages -------------------------------------------------------------------------------------------------

    @workflow.signal
    def lease_granted(self, pool: str) -> None:
        self.state.leased = pool == self.state.pool

    @workflow.signal
    def step_finished(self, finished: StepFinished) -> None:
        self._finish_step(finished)

    @workflow.update(description="Queue a step: an evaluation, or one more training step")
    def submit_step(self, request: SubmitStep) -> int:
        if self._first_time(request.request_id):
            self.state.submitted.append(request)
        return len(self.state.submitted)

    @submit_step.validator
    def _check_submit(self, request: SubmitStep) -> None:
        if not request.train and not self.state.config.tasks.heldout:
            raise ValueError("the run has no held-out tasks to evaluate on: set tasks.heldout")

    @workflow.update(description="Stop admitting episodes; running ones go to their end")
    async def pause(self, request: PauseRequest) -> str:
        if self._first_time(request.request_id):
            self.state.paused, self.state.hold = True, request.hold
            await self._pass_pause()
        return "paused"

    @workflow.update(description="Go on after a pause")
    async def resume(self, request: PauseRequest) -> str:
        if self._first_time(request.request_id):
            self.state.paused, self.state.hold = False, False
            await self._pass_pause()
        return "running"

    @workflow.query(description="Where the run is and what it waits for")
    def status(self) -> RunStatus:
        state = self.state
        return RunStatus(
            run=state.config.name,
            phase=self._phase(),
            paused=state.paused,
            trained_version=state.trained_version,
            steps_opened=state.next_step,
            open_steps=sorted(state.open_steps),
            results=state.results[-64:],
            waiting_for=self._waiting_for(),
        )

    # --- the loop -------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        state = self.state
        if state.facts is None:
            state.facts = await activity_calls.inspect_run(state.config)
            state.candidate_ref = state.facts.candidate_ref
        config = state.config
        if not state.leased:
            request = LeaseRequest(
                run=config.name,
                version=state.trained_version,
                candidate_ref=state.candidate_ref,
                context=RunContext.of(config),
                scheduler=config.scheduler,
            )
            self._describe()
            await self._await_lease(request)

    async def _await_lease(self, request: LeaseRequest) -> None:
        """Ask again now and then: a scheduler that was started anew has heard of nobody."""
        state, patience = self.state, ASK_AGAIN
        while True:
            await workflow.get_external_workflow_handle(names.scheduler_id(state.pool)).signal("request_lease", request)
            heed_cancellation()
            try:
                await workflow.wait_condition(lambda: state.leased, timeout=patience)
            except TimeoutError:
                patience = min(2 * patience, ASK_AGAIN_AT_LAST)
            else:
                return

    async def _loop(self) -> None:
        state = self.state
        while not self._over():
            heed_cancellation()
            self._raise_failure()
            step = self._next()
            if step is not None:
                await self._open(step)
            else:
                self._describe()
                try:
                    await workflow.wait_condition(
                        lambda: self._over() or bool(state.failure) or self._next() is not None, timeout=RECONCILE
                    )
                except TimeoutError:
                    await self._reconcile()
            if workflow.info().get_current_history_length() >= state.history_limit:
                await workflow.wait_condition(workflow.all_handlers_finished)
                workflow.continue_as_new(state)

    def _over(self) -> bool:
        state = self.state
        trained = state.trained_version >= state.config.steps + state.extra_tasks
        return (
            bool(state.config.steps)
            and trained
            and not state.open_steps
            and not state.submitted
            and not self._evaluation_due()
        )

    def _next(self) -> StepInput | None:
        """The step to open now, or None when the run must wait."""
        state, config = self.state, self.state.config
        if state.paused or any(not step.train for step in state.open_steps.values()):
            return None
        if self._evaluation_due():
            return self._evaluation(config.evaluation.tasks) if not state.open_steps else None
        if state.submitted:
            request = state.submitted[0]
            if not request.train:
                return self._evaluation(request.tasks) if not state.open_steps else None
        elif state.next_version >= config.steps:
            return None
        if state.next_version - state.trained_version > config.max_staleness:
            return None
        if self._is_due(state.next_version) and state.next_version not in state.evaluated:
            return None  # the evaluation of that version comes first
        return self._training(state.submitted[0].tasks if state.submitted else config.tasks_per_step)

    def _evaluation_due(self) -> bool:
        return self._is_due(self.state.trained_version) and self.state.trained_version not in self.state.evaluated

    def _is_due(self, version: int) -> bool:
        config = self.state.config
        if not config.evaluation.every or not config.tasks.heldout:
            return False
        return version % config.evaluation.every == 0 or version == config.steps

    def _evaluation(self, tasks: int) -> StepInput:
        state = self.state
        available = state.facts.heldout_tasks if state.facts else 0
        return StepInput(
            config=state.config,
            pool=state.pool,
            step=state.next_step,
            version=state.trained_version,
            train=False,
            candidate_ref=state.candidate_ref,
            tasks=list(range(min(tasks, available))),
            group_size=1,
        )

    def _training(self, tasks: int) -> StepInput:
        state = self.state
        current = state.next_version == state.trained_version
        return StepInput(
            config=state.config,
            pool=state.pool,
            step=state.next_step,
            version=state.next_version,
            train=True,
            candidate_ref=state.candidate_ref if current else "",
            tasks=draw_tasks(
                state.facts.train_tasks if state.facts else 0,
                tasks,
                seed=state.config.seed,
                version=state.next_version,
                shuffled=state.config.task_order == "shuffled",
            ),
            group_size=state.config.group_size,
            tokens_per_s=next(
                (result.tokens_per_s for result in reversed(state.results) if result.tokens_per_s), 1000.0
            ),
        )

    async def _open(self, step: StepInput) -> None:
        state = self.state
        if not step.train and self._evaluation_due():
            state.evaluated.append(step.version)
        elif state.submitted:
            request = state.submitted.pop(0)
            state.extra_tasks += int(request.train and state.next_version >= state.config.steps)
        if step.train:
            state.next_version += 1
        state.next_step += 1
        state.open_steps[step.step] = OpenedStep(version=step.version, train=step.train)
        await workflow.start_child_workflow(
            Step.run,
            step,
            id=names.step_id(step.run, step.step),
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            static_summary=f"{'train' if step.train else 'evaluate'} version {step.version}",
        )
        self._describe()

    def _finish_step(self, finished: StepFinished) -> None:
        state = self.state
        if state.open_steps.pop(finished.step, None) is None:
            return  # told twice
        if finished.result is None:
            state.failure = f"step {finished.step} failed: {finished.error}"
            return
        state.results = [*state.results, finished.result][-KEPT_RESULTS:]
        if finished.result.train and finished.result.version > state.trained_version:
            state.trained_version = finished.result.version
            state.candidate_ref = finished.result.candidate_ref
        self._describe()

    async def _reconcile(self) -> None:
        """Find steps that ended without a word."""
        state = self.state
        if not state.open_steps:
            return
        for name, status in (await activity_calls.describe_steps(state.config.name, sorted(state.open_steps))).items():
            if status not in ("RUNNING", "COMPLETED"):
                self._finish_step(StepFinished(step=int(name), result=None, error=f"its workflow is {status}"))

    def _raise_failure(self) -> None:
        if self.state.failure:
            raise ApplicationError(self.state.failure, type="StepFailed", non_retryable=True)

    async def _pass_pause(self) -> None:
        scheduler = workflow.get_external_workflow_handle(names.scheduler_id(self.state.pool))
        await scheduler.signal("hold_calls", args=[self.state.config.name, self.state.hold])
        for step in sorted(self.state.open_steps):
            await tell(names.step_id(self.state.config.name, step), "set_paused", self.state.paused)

    async def _cancel_steps(self) -> None:
        for step in sorted(self.state.open_steps):
            try:
                await workflow.get_external_workflow_handle(names.step_id(self.state.config.name, step)).cancel()
            except ApplicationError as error:
                workflow.logger.info("step %s is over: %s", step, error)

    async def _release(self) -> None:
        scheduler = workflow.get_external_workflow_handle(names.scheduler_id(self.state.pool))
        await scheduler.signal("release_lease", self.state.config.name)

    def _first_time(self, request_id: str) -> bool:
        if request_id in self.state.handled:
            return False
        self.state.handled = [*self.state.handled, request_id][-KEPT_REQUESTS:]
        return True

    # --- words ----------------------------------------------------------------------------------------------------

    def _phase(self) -> str:
        if self.state.failure:
            return "failed"
        if self.state.facts is None:
            return "validating"
        if not self.state.leased:
            return "waiting"
        return "done" if self._over() else "running"

    def _waiting_for(self) -> str:
        state = self.state
        if not state.leased:
            return f"the cells of pool {state.pool}: another run has them"
        if state.paused:
            return "gyre resume"
        return "steps " + ", ".join(map(str, sorted(state.open_steps))) if state.open_steps else "nothing"

    def _describe(self) -> None:
        state = self.state
        lines = [
            f"**run {state.config.name}** · {self._phase()}{' (paused)' if state.paused else ''}",
            f"- version {state.trained_version} of {state.config.steps} trained",
            f"- waiting for: {self._waiting_for()}",
        ]
        for result in state.results[-12:]:
            kind = f"trained version {result.version}" if result.train else f"evaluated version {result.version}"
            lines.append(
                f"- step {result.step}: {kind}, pass rate {result.pass_rate:.3f}, "
                f"{result.valid} of {result.episodes} episodes valid, {result.seconds:.1f} s"
            )
        workflow.set_current_details("\n".join(lines))


def draw_tasks(available: int, count: int, *, seed: int, version: int, shuffled: bool = True) -> list[int]:
    """Task indices of the step that trains ``version``: passes over the whole set, each in a seeded order.

    Every task is drawn once before any is drawn twice. Raises ValueError for an empty set.
    """
    if available < 1:
        raise ValueError("the training task set is empty")
    drawn: list[int] = []
    position = version * count
    while len(drawn) < count:
        epoch, offset = divmod(position + len(drawn), available)
        order = list(range(available))
        if shuffled:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        drawn += order[offset : offset + count - len(drawn)]
    return drawn
