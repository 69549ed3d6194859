"""`gyre.Step`: one policy update, or one evaluation.

It starts the groups, gives their micro-steps to the cells that train (it alone arbitrates claims), and makes the
update when every micro-step is in exactly one gradient sum. The candidate in this workflow's history is the commit
of version v+1; LATEST and publication follow from it.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from temporalio import workflow
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from workflows import calls, names
    from workflows.cancellation import heed_cancellation
    from workflows.contracts import GroupInput, GroupResult, StepInput, StepResult
    from workflows.gradient_ledger import GradientLedger, Trainer
    from workflows.group import Group, cause_of
    from workflows.orders import (
        Candidate,
        CommitInput,
        FinishInput,
        GaugesInput,
        GradientsInput,
        GradientSum,
        RunContext,
        StepClosed,
        StepFinished,
        StepOpened,
        StepProgress,
        TrainerReady,
        TrainInput,
    )

WAVE = 64
"""Groups in flight at once: a wide fan-out in one workflow task would pass the server's message limit."""

GYRE_RUN = SearchAttributeKey.for_keyword("GyreRun")
GYRE_STEP = SearchAttributeKey.for_int("GyreStep")
GYRE_PHASE = SearchAttributeKey.for_keyword("GyrePhase")
GYRE_REWARD = SearchAttributeKey.for_float("GyreReward")


@workflow.defn(name="gyre.Step")
class Step:
    @workflow.init
    def __init__(self, step: StepInput) -> None:
        self.step = step
        self.groups: list[GroupResult] = []
        self.ledger = GradientLedger()
        self.base_ref = step.candidate_ref
        self.paused = False
        self.phase = "rollout"
        self.stats: dict[str, float] = {}
        self.maxima: dict[str, float] = {}
        self.claim_stats: list[str] = []
        self.trained_tokens = 0
        self.trained_s = 0.0
        self.claims: set[asyncio.Task[None]] = set()
        self.running_at_first_switch = 0
        self.satellites: list[str] = []

    @workflow.run
    async def run(self, step: StepInput) -> StepResult:
        started = workflow.now()
        workflow.upsert_search_attributes(
            [
                GYRE_RUN.value_set(step.run),
                GYRE_STEP.value_set(step.step),
                GYRE_PHASE.value_set("train" if step.train else "evaluate"),
            ]
        )
        await calls.open_step(step)
        await self._tell_scheduler("step_opened", self._opened())
        heed_cancellation()
        if step.train and step.config.max_staleness:
            await calls.await_turn(step.run, step.step)
        training = asyncio.create_task(self._train()) if step.train else None
        await self._run_groups()
        candidate = await training if training is not None else None
        result = self._result(candidate, (workflow.now() - started).total_seconds())
        committed = await calls.commit_candidate(
            CommitInput(
                run=step.run,
                step=step.step,
                version=result.version,
                candidate_ref=result.candidate_ref,
                result=result,
                gauges=GaugesInput(
                    version=step.version,
                    groups=[group.stats_ref for group in self.groups if group.stats_ref],
                    claims=self.claim_stats,
                ),
            )
        )
        if committed is not None:
            result = result.model_copy(update={"gauges": committed.gauges, "gauges_ref": committed.gauges_ref})
        self._enter("closed")
        workflow.upsert_search_attributes([GYRE_REWARD.value_set(result.mean_reward)])
        closed = StepClosed(
            run=step.run,
            step=step.step,
            version=result.version if step.train else -1,
            candidate_ref=result.candidate_ref if step.train else "",
        )
        await self._tell_scheduler("step_closed", closed)
        await calls.close_step(step.run, step.step)
        await self._tell_run(StepFinished(step=step.step, result=result))
        return result

    # --- messages -------------------------------------------------------------------------------------------------

    @workflow.signal(description="A cell's replica holds the step's version and can be given micro-steps")
    async def trainer_ready(self, ready: TrainerReady) -> None:
        if not self.step.train or self.phase == "closed":
            return
        if not self.ledger.trainers:
            self.running_at_first_switch = max(self.running_at_first_switch, ready.running)
        if not self.ledger.join(ready):
            await self._fence(ready.cell, ready.incarnation)
        self._describe()

    @workflow.signal(description="Stop (or go on) starting groups")
    def set_paused(self, paused: bool) -> None:
        self.paused = paused

    @workflow.query(description="Groups that are done, and who trains what")
    def progress(self) -> dict[str, object]:
        return {
            "phase": self.phase,
            "groups_done": len(self.groups),
            "groups": len(self.step.tasks),
            "passed": sum(group.passed for group in self.groups),
            "valid": sum(group.valid for group in self.groups),
            "micro_steps": len(self.ledger.micro_steps),
            "open_micro_steps": len(self.ledger.open_refs),
            "trainers": {t.ready.cell: len(t.summed) for t in self.ledger.trainers.values()},
            "paused": self.paused,
        }

    # --- rollout --------------------------------------------------------------------------------------------------

    async def _run_groups(self) -> None:
        slots = asyncio.Semaphore(WAVE)
        await asyncio.gather(*(self._run_group(group, slots) for group in range(len(self.step.tasks))))
        if self.phase == "rollout":
            self._enter("training" if self.step.train else "closing")

    async def _run_group(self, group: int, slots: asyncio.Semaphore) -> None:
        step = self.step
        async with slots:
            await workflow.wait_condition(lambda: not self.paused)
            result = await workflow.execute_child_workflow(
                Group.run,
                GroupInput(
                    config=step.config,
                    step=step.step,
                    version=step.version,
                    oldest_version=step.oldest_version,
                    train=step.train,
                    group=group,
                    task=step.tasks[group],
                    group_size=step.group_size,
                ),
                id=names.group_id(step.run, step.step, group),
                parent_close_policy=workflow.ParentClosePolicy.ABANDON,
                static_summary=f"step {step.step}, task {step.tasks[group]}",
            )
        self.groups.append(result)
        if step.train:
            self.ledger.add(result.micro_steps)
            await self._report_progress()
        self._describe()

    # --- training -------------------------------------------------------------------------------------------------

    async def _train(self) -> Candidate:
        """Claims until every micro-step is summed, then the update; again from what a lost replica took along."""
        while True:
            await workflow.wait_condition(lambda: self._can_claim() or self._can_finish())
            if self._can_finish():
                candidate = await self._finish()
                if candidate is not None:
                    return candidate
                continue
            for trainer in self.ledger.idle:
                if not self.ledger.waiting:
                    break
                share = self.ledger.tokens(self.ledger.waiting) // max(1, len(self.ledger.idle)) + 1
                refs = self.ledger.claim(trainer.ready.incarnation, min(share, self._claim_tokens()))
                task = asyncio.create_task(self._train_claim(trainer, refs))
                self.claims.add(task)
                task.add_done_callback(self.claims.discard)

    def _can_claim(self) -> bool:
        return bool(self.ledger.waiting and self.ledger.idle)

    def _can_finish(self) -> bool:
        all_groups = len(self.groups) == len(self.step.tasks)
        return all_groups and self.ledger.complete and self.ledger.core is not None

    def _claim_tokens(self) -> int:
        return int(self.step.config.scheduler.claim_s * (self._tokens_per_s() or 1000.0))

    def _tokens_per_s(self) -> float:
        return self.trained_tokens / self.trained_s if self.trained_s > 1 else 0.0

    async def _train_claim(self, trainer: Trainer, refs: list[str]) -> None:
        ready, step = trainer.ready, self.step
        order = TrainInput(
            cell=ready.cell,
            incarnation=ready.incarnation,
            run=step.run,
            step=step.step,
            version=step.version,
            micro_steps=refs,
        )
        try:
            result = await calls.train_micro_steps(order)
        except ActivityError as error:
            await self._lose(trainer, error)
            return
        self.ledger.done(ready.incarnation)
        self.trained_tokens += self.ledger.tokens(refs)
        self.trained_s += result.seconds
        if result.stats_ref:
            self.claim_stats.append(result.stats_ref)
        for name, value in result.stats.items():
            if name.startswith("max_"):
                self.maxima[name] = max(self.maxima.get(name, 0.0), value)
            else:
                self.stats[name] = self.stats.get(name, 0.0) + value
        await self._report_progress()

    async def _finish(self) -> Candidate | None:
        """The update. None when a replica was lost on the way: its micro-steps wait again."""
        self._enter("updating")
        core, step = self.ledger.core, self.step
        if core is None:
            return None
        sums: list[GradientSum] = []
        for trainer in list(self.ledger.trainers.values()):
            if trainer is core or not trainer.summed:
                continue
            order = GradientsInput(
                cell=trainer.ready.cell, incarnation=trainer.ready.incarnation, run=step.run, step=step.step
            )
            try:
                sums.append(await calls.offer_gradients(order))
            except ActivityError as error:
                await self._lose(trainer, error)
                return None
        finish = FinishInput(
            cell=core.ready.cell,
            incarnation=core.ready.incarnation,
            run=step.run,
            step=step.step,
            version=step.version,
            normaliser=max(1, sum(group.in_normaliser for group in self.groups)),  # 1: nothing to divide
            micro_steps=list(self.ledger.micro_steps),
            satellites=sums,
            record_gradient=step.config.record_gradients,
        )
        try:
            candidate = await calls.finish_step(finish)
        except ActivityError as error:
            await self._lose(core, error)
            return None
        self.satellites = [offer.cell for offer in sums]
        return candidate

    async def _lose(self, trainer: Trainer, error: ActivityError) -> None:
        again = self.ledger.lose(trainer.ready.incarnation)
        workflow.logger.warning(
            "%s (%s) is lost to step %s, %d micro-steps wait again: %s",
            trainer.ready.cell,
            trainer.ready.incarnation,
            self.step.step,
            len(again),
            cause_of(error),
        )
        self._enter("training")
        await self._fence(trainer.ready.cell, trainer.ready.incarnation)
        await self._report_progress()

    async def _fence(self, cell: str, incarnation: str) -> None:
        try:
            await workflow.get_external_workflow_handle(names.cell_id(cell)).signal("fence", incarnation)
        except ApplicationError as error:
            workflow.logger.warning("cannot fence %s: %s", cell, error)

    # --- words ----------------------------------------------------------------------------------------------------

    def _opened(self) -> StepOpened:
        step, config = self.step, self.step.config
        return StepOpened(
            run=step.run,
            step=step.step,
            version=step.version,
            train=step.train,
            episodes=len(step.tasks) * step.group_size,
            candidate_ref=step.candidate_ref,
            context=RunContext(run=config.name, policy=config.policy, optimizer=config.optimizer, loss=config.loss),
            scheduler=config.scheduler,
        )

    async def _report_progress(self) -> None:
        if self.step.train:
            refs = self.ledger.open_refs
            progress = StepProgress(
                run=self.step.run,
                step=self.step.step,
                ready=len(refs),
                ready_tokens=self.ledger.tokens(refs),
                tokens_per_s=self._tokens_per_s(),
            )
            await self._tell_scheduler("step_progress", progress)

    async def _tell_scheduler(self, signal: str, message: StepOpened | StepProgress | StepClosed) -> None:
        handle = workflow.get_external_workflow_handle(names.scheduler_id(self.step.pool))
        await handle.signal(signal, message)

    async def _tell_run(self, finished: StepFinished) -> None:
        try:
            await workflow.get_external_workflow_handle(names.run_id(self.step.run)).signal("step_finished", finished)
        except ApplicationError as error:  # a run that was cancelled no longer listens; the result stays with the step
            workflow.logger.warning("nobody hears of step %s: %s", self.step.step, error)

    def _result(self, candidate: Candidate | None, seconds: float) -> StepResult:
        groups, step = self.groups, self.step
        outcomes: Counter[str] = Counter()
        reasons: Counter[str] = Counter(group.reason for group in groups if group.reason)
        for group in groups:
            outcomes.update(group.outcomes)
        valid = sum(group.valid for group in groups)
        oldest = min((group.oldest_version for group in groups if group.oldest_version >= 0), default=step.version)
        core = self.ledger.core
        return StepResult(
            run=step.run,
            step=step.step,
            version=candidate.version if candidate else step.version,
            train=step.train,
            candidate_ref=candidate.ref if candidate else self.base_ref,
            episodes=len(step.tasks) * step.group_size,
            valid=valid,
            passed=sum(group.passed for group in groups),
            mean_reward=sum(group.reward_sum for group in groups) / valid if valid else 0.0,
            outcomes=dict(outcomes),
            groups_without_gradient=dict(reasons),
            micro_steps=len(self.ledger.micro_steps),
            sampled_tokens=sum(group.sampled_tokens for group in groups),
            trained_tokens=sum(group.trained_tokens for group in groups),
            staleness=step.version - oldest,
            grad_norm=candidate.grad_norm if candidate else 0.0,
            moved_calls=sum(group.moved_calls for group in groups),
            held_s=sum(group.held_s for group in groups),
            episodes_running_at_first_switch=self.running_at_first_switch,
            core=core.ready.cell if core else "",
            satellites=self.satellites,
            seconds=seconds,
            train_stats={**self.stats, **self.maxima},
        )

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._describe()

    def _describe(self) -> None:
        step, ledger = self.step, self.ledger
        valid, passed = sum(g.valid for g in self.groups), sum(g.passed for g in self.groups)
        kind = "training" if step.train else "evaluation"
        lines = [
            f"**{kind} step {step.step}, version {step.version}** · {self.phase}{' (paused)' if self.paused else ''}",
            f"- groups: {len(self.groups)} of {len(step.tasks)} done",
            f"- passed: {passed} of {valid} graded episodes",
        ]
        if step.train:
            open_refs = len(ledger.open_refs)
            lines.append(f"- micro-steps: {len(ledger.micro_steps) - open_refs} of {len(ledger.micro_steps)} trained")
            lines += [f"- {t.ready.cell}: {len(t.summed)} summed" for t in ledger.trainers.values()]
        workflow.set_current_details("\n".join(lines))
