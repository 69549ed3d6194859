"""The training half of a step: micro-steps to whoever trains, and the update once each is in exactly one gradient sum.

It alone arbitrates claims (`workflows.scheduling.gradient_ledger` holds who has what). Invariant: nothing here waits
for a trainer that has been declared lost; what it had waits again for the others, and only the core of that moment is
ever asked for the update. It knows groups by their results, and nothing of episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError

from workflows import activity_calls, names
from workflows.contracts.orders import (
    Candidate,
    FinishInput,
    GradientsInput,
    GradientSum,
    TrainerGone,
    TrainerReady,
    TrainInput,
)
from workflows.contracts.results import GroupResult, StepInput
from workflows.group import cause_of
from workflows.scheduling.gradient_ledger import GradientLedger, Trainer
from workflows.signals import tell

Answer = TypeVar("Answer")


class Gone(Exception):
    """The trainer that an order is for has been lost, or taken away."""


class StepTraining:
    """Of one step. ``groups`` grows as groups finish; ``report`` tells the scheduler what work waits, ``enter`` the
    people which phase has begun."""

    def __init__(
        self,
        step: StepInput,
        groups: Sequence[GroupResult],
        report: Callable[[], Awaitable[None]],
        enter: Callable[[str], None],
    ) -> None:
        self._step, self._groups, self._report, self._enter = step, groups, report, enter
        self.ledger = GradientLedger()
        self.core = ""
        """Cell that made the update; empty until it is made."""
        self.satellites: list[str] = []
        """Cells whose sums are in it."""
        self.stats: dict[str, float] = {}
        """Sums and maxima (``max_…``) over the claims that ended."""
        self.claim_stats: list[str] = []
        self._trained_tokens = 0
        self._trained_s = 0.0
        self._claims: set[asyncio.Task[None]] = set()

    @property
    def tokens_per_s(self) -> float:
        """Measured throughput of one cell; 0 while unknown."""
        return self._trained_tokens / self._trained_s if self._trained_s > 1 else 0.0

    async def run(self) -> Candidate:
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
                claim_tokens = self._step.config.scheduler.claim_s * (self.tokens_per_s or self._step.tokens_per_s)
                refs = self.ledger.claim(trainer.ready.incarnation, claim_tokens)
                task = asyncio.create_task(self._train_claim(trainer, refs))
                self._claims.add(task)
                task.add_done_callback(self._claims.discard)

    async def join(self, ready: TrainerReady) -> None:
        """A cell's replica can be given micro-steps; one that was declared lost is told to begin anew."""
        if not self.core and not self.ledger.join(ready):
            await tell(names.cell_id(ready.cell), "fence", ready.incarnation)

    async def leave(self, gone: TrainerGone) -> None:
        """A cell is lost, or has been given something else to do: others do again what it has summed."""
        if self.core:
            return
        again = self.ledger.leave(gone.cell, gone.epoch)
        if again:
            workflow.logger.warning("%s: %d micro-steps of %s wait again", gone.reason, len(again), gone.cell)
            await self._report()

    def _can_claim(self) -> bool:
        return bool(self.ledger.waiting and self.ledger.idle)

    def _can_finish(self) -> bool:
        all_groups = len(self._groups) == len(self._step.tasks)
        return all_groups and self.ledger.complete and self.ledger.core is not None

    async def _train_claim(self, trainer: Trainer, refs: list[str]) -> None:
        ready, step = trainer.ready, self._step
        order = TrainInput(
            cell=ready.cell,
            incarnation=ready.incarnation,
            run=step.run,
            step=step.step,
            version=step.version,
            micro_steps=refs,
        )
        try:
            result = await self._while_there(
                trainer, activity_calls.train_micro_steps(order, step.config.scheduler.lost_s)
            )
        except Gone:
            return
        except ActivityError as error:
            await self._lose(trainer, error)
            return
        if not self.ledger.done(ready.incarnation):
            return
        self._trained_tokens += self.ledger.tokens(refs)
        self._trained_s += result.seconds
        if result.stats_ref:
            self.claim_stats.append(result.stats_ref)
        for name, value in result.stats.items():
            before = self.stats.get(name, 0.0)
            self.stats[name] = max(before, value) if name.startswith("max_") else before + value
        await self._report()

    async def _finish(self) -> Candidate | None:
        """The update. None when a replica was lost on the way: its micro-steps wait again."""
        self._enter("updating")
        try:
            candidate = await self._update()
        except Gone:
            candidate = None
        if candidate is None:
            self._enter("training")
        return candidate

    async def _update(self) -> Candidate | None:
        core, step = self.ledger.core, self._step
        if core is None:
            return None
        lost_s = step.config.scheduler.lost_s
        sums: list[GradientSum] = []
        for trainer in list(self.ledger.trainers.values()):
            if trainer is core or not trainer.summed:
                continue
            order = GradientsInput(
                cell=trainer.ready.cell, incarnation=trainer.ready.incarnation, run=step.run, step=step.step
            )
            try:
                sums.append(await self._while_there(trainer, activity_calls.offer_gradients(order, lost_s)))
            except ActivityError as error:
                await self._lose(trainer, error)
                return None
        finish = FinishInput(
            cell=core.ready.cell,
            incarnation=core.ready.incarnation,
            run=step.run,
            step=step.step,
            version=step.version,
            normaliser=max(1, sum(group.in_normaliser for group in self._groups)),  # 1: nothing to divide
            micro_steps=list(self.ledger.micro_steps),
            satellites=sums,
            record_gradient=step.config.record_gradients,
        )
        try:
            candidate = await self._while_there(core, activity_calls.finish_step(finish, lost_s))
        except ActivityError as error:
            unread = activity_calls.lost_sums(error)
            at_fault = [trainer for name, trainer in self.ledger.trainers.items() if name in unread]
            for trainer in at_fault if unread else [core]:
                await self._lose(trainer, error)
            return None
        self.core, self.satellites = core.ready.cell, [offer.cell for offer in sums]
        return candidate

    async def _while_there(self, trainer: Trainer, order: Coroutine[Any, Any, Answer]) -> Answer:
        """The answer to a trainer's order. Raises Gone as soon as the trainer is declared lost."""
        answer = asyncio.create_task(order)
        await workflow.wait_condition(lambda: answer.done() or trainer.gone)
        if not answer.done():
            activity_calls.abandon(answer)
            raise Gone
        return await answer

    async def _lose(self, trainer: Trainer, error: ActivityError) -> None:
        if trainer.gone:
            return
        again = self.ledger.lose(trainer.ready.incarnation)
        workflow.logger.warning(
            "%s (%s) is lost to step %s, %d micro-steps wait again: %s",
            trainer.ready.cell,
            trainer.ready.incarnation,
            self._step.step,
            len(again),
            cause_of(error),
        )
        self._enter("training")
        await tell(names.cell_id(trainer.ready.cell), "fence", trainer.ready.incarnation)
        await self._report()
