"""Who has trained which micro-step: the arbitration of one step's gradient, without Temporal.

Invariant: at any time each micro-step is exactly one of waiting, claimed by one incarnation, or in the sum of one
incarnation. An incarnation that is declared lost takes its sum with it: all its micro-steps wait again, and it is
fenced for good. The core is the cell that was named last: an older one, lost or not, is never core again by itself. A
satellite that becomes core keeps its sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from workflows.contracts.orders import TrainerReady
from workflows.contracts.results import MicroStepRef


@dataclass
class Trainer:
    ready: TrainerReady
    claimed: list[str] = field(default_factory=list)
    summed: list[str] = field(default_factory=list)
    gone: bool = False
    """Declared lost: nobody waits for its orders."""

    @property
    def idle(self) -> bool:
        return not self.claimed


@dataclass
class GradientLedger:
    micro_steps: dict[str, MicroStepRef] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    waiting_tokens: int = 0
    trainers: dict[str, Trainer] = field(default_factory=dict)
    """Incarnation -> its work."""
    fenced: set[str] = field(default_factory=set)
    left: dict[str, int] = field(default_factory=dict)
    """Cell -> epoch before which nothing of it counts: it was lost, or given something else to do."""

    def add(self, micro_steps: Iterable[MicroStepRef]) -> None:
        for micro_step in micro_steps:
            if micro_step.ref not in self.micro_steps:
                self.micro_steps[micro_step.ref] = micro_step
                self._wait([micro_step.ref])

    def join(self, ready: TrainerReady) -> bool:
        """Take a trainer in. False when its incarnation has been declared lost: it must begin anew.

        One that reports from before its cell was taken away is not taken in, and there is nothing to be done about it.
        """
        if ready.epoch < self.left.get(ready.cell, 0):
            return True
        if ready.incarnation in self.fenced:
            return False
        for other in [t for t in self.trainers.values() if t.ready.cell == ready.cell]:
            if other.ready.incarnation != ready.incarnation:
                self.lose(other.ready.incarnation)
        known = self.trainers.get(ready.incarnation)
        if known is None:
            self.trainers[ready.incarnation] = Trainer(ready)
        else:
            known.ready = ready
        return True

    def claim(self, incarnation: str, tokens: float) -> list[str]:
        """The one rule by which a claim is cut: of what waits an equal share to each idle trainer, at most ``tokens``
        tokens of it (about so many seconds of work), whole micro-steps, at least one, the first waiting first."""
        trainer = self.trainers[incarnation]
        if not trainer.idle:
            raise ValueError(f"{incarnation} has a claim already")
        room = min(self.waiting_tokens // len(self.idle) + 1, int(tokens))
        while self.waiting and (not trainer.claimed or self.micro_steps[self.waiting[0]].tokens <= room):
            ref = self.waiting.pop(0)
            room -= self.micro_steps[ref].tokens
            self.waiting_tokens -= self.micro_steps[ref].tokens
            trainer.claimed.append(ref)
        return list(trainer.claimed)

    def done(self, incarnation: str) -> bool:
        """The trainer's claim is in its sum. False when the trainer has been lost meanwhile, and its claim with it."""
        trainer = self.trainers.get(incarnation)
        if trainer is None:
            return False
        trainer.summed += trainer.claimed
        trainer.claimed = []
        return True

    def lose(self, incarnation: str) -> list[str]:
        """Declare an incarnation lost; returns the micro-steps that wait again because of it."""
        self.fenced.add(incarnation)
        trainer = self.trainers.pop(incarnation, None)
        if trainer is None:
            return []
        trainer.gone = True
        again = trainer.summed + trainer.claimed
        self._wait(again)
        return again

    def leave(self, cell: str, epoch: int) -> list[str]:
        """A cell trains this step no more, as of an epoch; returns the micro-steps that wait again because of it."""
        self.left[cell] = max(epoch, self.left.get(cell, 0))
        of_cell = [trainer.ready for trainer in self.trainers.values() if trainer.ready.cell == cell]
        return [ref for ready in of_cell if ready.epoch < epoch for ref in self.lose(ready.incarnation)]

    @property
    def core(self) -> Trainer | None:
        """The trainer that was prepared as core last: with optimizer state. None while there is none."""
        cores = [trainer for trainer in self.trainers.values() if trainer.ready.core]
        return max(cores, key=lambda trainer: trainer.ready.epoch, default=None)

    @property
    def idle(self) -> list[Trainer]:
        return [trainer for trainer in self.trainers.values() if trainer.idle]

    @property
    def complete(self) -> bool:
        """Every micro-step is in some living trainer's sum."""
        return not self.waiting and all(trainer.idle for trainer in self.trainers.values())

    @property
    def open_refs(self) -> list[str]:
        """Micro-steps that wait or are being trained."""
        return self.waiting + [ref for trainer in self.trainers.values() for ref in trainer.claimed]

    def tokens(self, refs: Iterable[str]) -> int:
        return sum(self.micro_steps[ref].tokens for ref in refs)

    def _wait(self, refs: list[str]) -> None:
        self.waiting += refs
        self.waiting_tokens += self.tokens(refs)
