"""Who has trained what: each micro-step in exactly one living sum, whatever is lost on the way."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workflows.contracts.orders import TrainerReady
from workflows.contracts.results import MicroStepRef
from workflows.scheduling.gradient_ledger import GradientLedger


def ready(cell: int, incarnation: str, core: bool = False, epoch: int = 1) -> TrainerReady:
    return TrainerReady(cell=f"cell-{cell}", incarnation=incarnation, epoch=epoch, core=core, running=0)


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.ledger = GradientLedger()
        self.added: set[str] = set()
        self.births = 0
        self.epoch = 0

    @rule(tokens=st.integers(1, 5000))
    def group_finishes(self, tokens: int) -> None:
        ref = f"m{len(self.added)}"
        self.added.add(ref)
        self.ledger.add([MicroStepRef(ref=ref, tokens=tokens, targets=1)])

    @rule(cell=st.integers(0, 2), core=st.booleans())
    def a_fresh_replica_joins(self, cell: int, core: bool) -> None:
        self.births += 1
        self.epoch += 1
        assert self.ledger.join(ready(cell, f"i{self.births}", core, self.epoch))
        if core:
            assert self.ledger.core is self.ledger.trainers[f"i{self.births}"], "the core is the one named last"

    @precondition(lambda self: self.ledger.trainers)
    @rule()
    def a_satellite_becomes_core_and_keeps_its_sum(self) -> None:
        trainer = next(iter(self.ledger.trainers.values()))
        summed = list(trainer.summed)
        self.epoch += 1
        assert self.ledger.join(trainer.ready.model_copy(update={"core": True, "epoch": self.epoch}))
        assert self.ledger.core is trainer and trainer.summed == summed

    @precondition(lambda self: self.ledger.trainers)
    @rule()
    def a_cell_is_taken_away(self) -> None:
        before = next(iter(self.ledger.trainers.values()))
        self.epoch += 1
        assert self.ledger.leave(before.ready.cell, self.epoch) == before.summed + before.claimed
        assert before.gone
        assert self.ledger.join(before.ready), "an old report is no reason to begin anew"
        assert before.ready.incarnation not in self.ledger.trainers
        again = before.ready.model_copy(update={"epoch": self.epoch + 1})
        assert not self.ledger.join(again), "a sum that was given up is fenced"

    @precondition(lambda self: self.ledger.idle and self.ledger.waiting)
    @rule(tokens=st.integers(0, 9000))
    def claim(self, tokens: int) -> None:
        assert self.ledger.claim(self.ledger.idle[0].ready.incarnation, tokens)

    @precondition(lambda self: any(not t.idle for t in self.ledger.trainers.values()))
    @rule()
    def claim_ends(self) -> None:
        busy = next(t for t in self.ledger.trainers.values() if not t.idle)
        assert self.ledger.done(busy.ready.incarnation)

    @precondition(lambda self: self.ledger.trainers)
    @rule()
    def replica_is_lost(self) -> None:
        incarnation = next(iter(self.ledger.trainers))
        self.ledger.lose(incarnation)
        assert not self.ledger.done(incarnation), "what a lost replica still says is worth nothing"
        late = ready(0, incarnation, epoch=self.epoch + 1)
        assert not self.ledger.join(late), "a lost incarnation is fenced for good"

    @invariant()
    def each_micro_step_is_in_one_place(self) -> None:
        places = list(self.ledger.waiting)
        for trainer in self.ledger.trainers.values():
            places += trainer.claimed + trainer.summed
        assert sorted(places) == sorted(self.added)
        assert self.ledger.waiting_tokens == self.ledger.tokens(self.ledger.waiting)

    @invariant()
    def complete_means_that_living_sums_hold_everything(self) -> None:
        if self.ledger.complete:
            summed = [ref for trainer in self.ledger.trainers.values() for ref in trainer.summed]
            assert sorted(summed) == sorted(self.added)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_core_is_the_one_that_the_scheduler_named() -> None:
    ledger = GradientLedger()
    ledger.join(ready(0, "a"))
    assert ledger.core is None, "a satellite has no optimizer state"
    ledger.join(ready(1, "b", core=True))
    assert ledger.core is not None and ledger.core.ready.incarnation == "b"
    ledger.lose("b")
    ledger.join(ready(0, "a", core=True))
    assert ledger.core is not None and ledger.core.ready.incarnation == "a"


def test_a_micro_step_that_is_told_twice_is_trained_once() -> None:
    ledger = GradientLedger()
    ledger.add([MicroStepRef(ref="m", tokens=1, targets=1)] * 2)
    ledger.join(ready(0, "a"))
    assert ledger.claim("a", 100) == ["m"]
    ledger.add([MicroStepRef(ref="m", tokens=1, targets=1)])
    assert not ledger.waiting


def test_a_replaced_replica_gives_its_work_back() -> None:
    ledger = GradientLedger()
    ledger.add([MicroStepRef(ref=f"m{i}", tokens=1, targets=1) for i in range(3)])
    ledger.join(ready(0, "a"))
    ledger.claim("a", 1)
    ledger.done("a")
    ledger.claim("a", 1)
    ledger.join(ready(0, "b"))
    assert sorted(ledger.waiting) == ["m0", "m1", "m2"]


def test_idle_trainers_share_what_waits_equally_up_to_a_claims_worth() -> None:
    ledger = GradientLedger()
    ledger.add([MicroStepRef(ref=f"m{i}", tokens=10, targets=1) for i in range(9)])
    for cell, incarnation in enumerate("abc"):
        ledger.join(ready(cell, incarnation))
    assert ledger.claim("a", 1000) == ["m0", "m1", "m2"], "a third"
    assert ledger.claim("b", 25.9) == ["m3", "m4"], "no more than fits"
    assert ledger.claim("c", 5) == ["m5"], "but one"
