"""`gyre.Step`: one policy update, or one evaluation.

It starts the groups and has their micro-steps trained and the update made as they finish (`workflows.step_training`).
The candidate in this workflow's history is the commit of version v+1; LATEST and publication follow from it.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from workflows import activity_calls, names
    from workflows.contracts.configuration import shared
    from workflows.contracts.orders import (
        Candidate,
        CommitInput,
        GaugesInput,
        RunContext,
        StepClosed,
        StepFinished,
        StepOpened,
        StepProgress,
        TrainerGone,
        TrainerReady,
    )
    from workflows.contracts.results import Figures, GroupInput, GroupResult, StepInput, StepResult
    from workflows.group import Group
    from workflows.signals import heed_cancellation, tell
    from workflows.step_training import StepTraining

WAVE = 64
"""Groups in flight at once: a wide fan-out in one workflow task would pass the server's message limit."""


@workflow.defn(name="gyre.Step")
class Step:
    @workflow.init
    def __init__(self, step: StepInput) -> None:
        self.step = step
        self.groups: list[GroupResult] = []
        self.figures = Figures()
        """Of ``groups``."""
        self.base_ref = step.candidate_ref
        self.paused = False
        self.phase = "rollout"
        self.running_at_first_switch = 0
        self.training = StepTraining(step, self.groups, self._report_progress, self._enter)
        self.ledger = self.training.ledger

    @workflow.run
    async def run(self, step: StepInput) -> StepResult:
        started = workflow.now()
        workflow.upsert_search_attributes(
            [
                names.GYRE_RUN.value_set(step.run),
                names.GYRE_STEP.value_set(step.step),
                names.GYRE_PHASE.value_set("train" if step.train else "evaluate"),
            ]
        )
        order = await activity_calls.open_step(step) or list(range(len(step.tasks)))
        await self._tell_scheduler("step_opened", self._opened())
        heed_cancellation()
        if step.train and step.config.max_staleness:
            await activity_calls.await_turn(step.run, step.step)
        training = asyncio.create_task(self.training.run()) if step.train else None
        await self._run_groups(order)
        candidate = await training if training is not None else None
        result = self._result(candidate, (workflow.now() - started).total_seconds())
        committed = await activity_calls.commit_candidate(
            CommitInput(
                run=step.run,
                step=step.step,
                version=result.version,
                candidate_ref=result.candidate_ref,
                result=result,
                gauges=GaugesInput(
                    version=step.version,
                    groups=[group.stats_ref for group in self.groups if group.stats_ref],
                    claims=self.training.claim_stats,
                ),
            )
        )
        if committed is not None:
            result = result.model_copy(update={"gauges": committed.gauges, "gauges_ref": committed.gauges_ref})
        self._enter("closed")
        workflow.upsert_search_attributes([names.GYRE_REWARD.value_set(result.mean_reward)])
        closed = StepClosed(
            run=step.run,
            step=step.step,
            version=result.version if step.train else -1,
            candidate_ref=result.candidate_ref if step.train else "",
        )
        await self._tell_scheduler("step_closed", closed)
        await activity_calls.close_step(step.run, step.step)
        # a run that was cancelled no longer listens; the result stays with the step
        await tell(names.run_id(step.run), "step_finished", StepFinished(step=step.step, result=result))
        return result

    # --- messages -------------------------------------------------------------------------------------------------

    @workflow.signal(description="A cell's replica holds the step's version and can be given micro-steps")
    async def trainer_ready(self, ready: TrainerReady) -> None:
        if not self.step.train:
            return
        if not self.ledger.trainers:
            self.running_at_first_switch = max(self.running_at_first_switch, ready.running)
        await self.training.join(ready)
        self._describe()

    @workflow.signal(description="A cell that trains the step is lost, or has been given something else to do")
    async def trainer_gone(self, gone: TrainerGone) -> None:
        if self.step.train:
            await self.training.leave(gone)
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
            "passed": self.figures.passed,
            "valid": self.figures.valid,
            "micro_steps": len(self.ledger.micro_steps),
            "open_micro_steps": len(self.ledger.open_refs),
            "trainers": {t.ready.cell: len(t.summed) for t in self.ledger.trainers.values()},
            "claimed": {t.ready.cell: len(t.claimed) for t in self.ledger.trainers.values()},
            "waiting_micro_steps": len(self.ledger.waiting),
            "core": self.ledger.core.ready.cell if self.ledger.core else "",
            "train": self.step.train,
            "version": self.step.version,
            "group_size": self.step.group_size,
            "paused": self.paused,
        }

    # --- rollout --------------------------------------------------------------------------------------------------

    async def _run_groups(self, order: list[int]) -> None:
        """All groups, started in ``order``."""
        slots = asyncio.Semaphore(WAVE)
        await asyncio.gather(*(self._run_group(group, slots) for group in order))
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
        self.figures += result
        if step.train:
            self.ledger.add(result.micro_steps)
            await self._report_progress()
        self._describe()

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
            context=RunContext.of(config),
            scheduler=config.scheduler,
        )

    def _rollout_tokens_per_s(self) -> float:
        active_s = sum(group.active_s for group in self.groups)
        return self.ledger.tokens(self.ledger.micro_steps) / active_s if active_s else 0.0

    async def _report_progress(self) -> None:
        if self.step.train:
            refs = self.ledger.open_refs
            progress = StepProgress(
                run=self.step.run,
                step=self.step.step,
                ready=len(refs),
                ready_tokens=self.ledger.tokens(refs),
                tokens_per_s=self.training.tokens_per_s,
                rollout_tokens_per_s=self._rollout_tokens_per_s(),
            )
            await self._tell_scheduler("step_progress", progress)

    async def _tell_scheduler(self, signal: str, message: StepOpened | StepProgress | StepClosed) -> None:
        handle = workflow.get_external_workflow_handle(names.scheduler_id(self.step.pool))
        await handle.signal(signal, message)

    def _result(self, candidate: Candidate | None, seconds: float) -> StepResult:
        groups, step, figures = self.groups, self.step, self.figures
        oldest = min((group.oldest_version for group in groups if group.oldest_version >= 0), default=step.version)
        return StepResult(
            **shared(figures, Figures),
            run=step.run,
            step=step.step,
            version=candidate.version if candidate else step.version,
            train=step.train,
            candidate_ref=candidate.ref if candidate else self.base_ref,
            episodes=len(step.tasks) * step.group_size,
            mean_reward=sum(group.reward_sum for group in groups) / figures.valid if figures.valid else 0.0,
            groups_without_gradient=dict(Counter(group.reason for group in groups if group.reason)),
            micro_steps=len(self.ledger.micro_steps),
            staleness=step.version - oldest,
            grad_norm=candidate.grad_norm if candidate else 0.0,
            episodes_running_at_first_switch=self.running_at_first_switch,
            core=self.training.core,
            satellites=self.training.satellites,
            seconds=seconds,
            tokens_per_s=self.training.tokens_per_s,
            train_stats=self.training.stats,
        )

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._describe()

    def _describe(self) -> None:
        step, ledger = self.step, self.ledger
        kind = "training" if step.train else "evaluation"
        lines = [
            f"**{kind} step {step.step}, version {step.version}** · {self.phase}{' (paused)' if self.paused else ''}",
            f"- groups: {len(self.groups)} of {len(step.tasks)} done",
            f"- passed: {self.figures.passed} of {self.figures.valid} graded episodes",
        ]
        if step.train:
            open_refs = len(ledger.open_refs)
            lines.append(f"- micro-steps: {len(ledger.micro_steps) - open_refs} of {len(ledger.micro_steps)} trained")
            lines += [f"- {t.ready.cell}: {len(t.summed)} summed" for t in ledger.trainers.values()]
        workflow.set_current_details("\n".join(lines))
