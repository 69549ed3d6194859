"""A discrete-event simulation of a run: the policies, the gradient ledger and the rules of production, without servers.

What decides is production's own code: `workflows.policies.decide` on a `PoolView`, and `GradientLedger`, with claims
cut as `gyre.Step` cuts them. What it decides about is simulated: serving cells give their places to the oldest step
first, a cell changes role in the measured time, a trainer stays with its step until that is closed, an update waits for
every micro-step, step k opens when k − trained version ≤ ``max_staleness``.

Deterministic: the same inputs give the same run. It knows nothing of tokens one by one, prefixes or the network.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count

from workflows.configuration import SchedulerConfig
from workflows.foresight import Foresight, Learned
from workflows.orders import TrainerReady
from workflows.policies import Assignment, CellView, Outlook, PoolView, StepView, decide
from workflows.pool_view import TOKENS_PER_S
from workflows.simulated_run import Segment, Simulated
from workflows.simulated_step import SimulatedStep
from workflows.simulated_work import PoolModel, Steps

ROLLOUT = Assignment()


class Stranded(RuntimeError):
    """Nothing more would ever happen, and work is left: a policy has stranded it."""


@dataclass
class SimulatedCell:
    name: str
    assigned: Assignment = ROLLOUT
    """What the scheduler told it last."""
    version: int = 0
    """Weight version it was told last."""
    holds: Assignment = ROLLOUT
    """What it is."""
    holds_version: int = 0
    moving: bool = False
    incarnation: int = 0
    busy: bool = False
    """Trains a claim."""


def simulate(
    pool: PoolModel,
    steps: Steps,
    scheduler: SchedulerConfig,
    *,
    max_staleness: int = 0,
    foresight: Foresight | None = None,
    longest_first: bool | None = None,
    timeline: bool = False,
) -> Simulated:
    """Run all ``steps``. ``longest_first``: admit the groups expected to take longest first; None: the policy's way.

    Raises Stranded when a policy leaves work that would never be done.
    """
    return _Simulation(
        pool, steps, scheduler, max_staleness, foresight, longest_first=longest_first, timeline=timeline
    ).run()


class _Simulation:
    def __init__(
        self,
        pool: PoolModel,
        steps: Steps,
        scheduler: SchedulerConfig,
        max_staleness: int,
        foresight: Foresight | None,
        *,
        longest_first: bool | None,
        timeline: bool,
    ) -> None:
        self.pool, self.work, self.scheduler, self.max_staleness = pool, steps, scheduler, max_staleness
        self.predicts = scheduler.policy == "predictive"
        self.foresight: Foresight = foresight or Learned(pool)
        self.longest_first = self.predicts if longest_first is None else longest_first
        self.timeline = timeline
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.serials = count()
        self.cells = [SimulatedCell(f"cell-{i:02d}") for i in range(pool.cells)]
        self.open: list[SimulatedStep] = []
        self.version = self.opened = 0
        self.tokens_per_s = TOKENS_PER_S
        self.pending_decision = False
        self.looked_at = -math.inf
        self.outlooks: dict[int, tuple[float, int, Outlook]] = {}
        self.cell_views: dict[tuple[str, int, bool], CellView] = {}
        self.result = Simulated(scheduler.policy, cells=pool.cells)
        self.since = [(0.0, "serve", -1)] * pool.cells

    # --- time -----------------------------------------------------------------------------------------------------

    def run(self) -> Simulated:
        self._open_steps()
        while len(self.result.closed_s) < len(self.work):
            due, step = self._next_end()
            if self.events and self.events[0][0] <= due:
                at, _, act = heappop(self.events)
                self._advance(at)
                act()
            elif step is not None and due < math.inf:
                self._advance(due)
                self._end_episodes(step)
            else:
                raise Stranded(f"{self.scheduler.policy} at {self.now:.1f} s: {self._describe()}")
        for index in range(len(self.cells)):
            self._mark(index, "end")
        return self.result

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heappush(self.events, (self.now + seconds, next(self.serials), act))

    def _serving(self) -> int:
        return sum(not cell.moving and cell.holds.step < 0 for cell in self.cells)

    def _rates(self) -> float:
        """Set every step's rates; returns the cells' worth of work that is being done."""
        serving = self._serving()
        seats = serving * self.pool.capacity
        left = seats
        for step in self.open:
            taken = min(step.running, left)
            step.share = taken / step.running if step.running else 0.0
            left -= taken
        if not seats:
            return 0.0
        occupied = (seats - left) / seats
        speed = self.pool.speed(occupied)
        for step in self.open:
            step.speed = speed * step.share
        return serving * occupied * speed

    def _next_end(self) -> tuple[float, SimulatedStep | None]:
        self.doing = self._rates()
        best, first = math.inf, None
        if self.doing:
            for step in self.open:
                after = step.next_end_s()
                if after < best:
                    best, first = after, step
        return self.now + best, first

    def _advance(self, at: float) -> None:
        seconds = at - self.now
        if seconds > 0:
            self.result.serve_s += self.doing * seconds
            if self.doing:
                for step in self.open:
                    step.advance(seconds)
        self.now = at

    # --- episodes -------------------------------------------------------------------------------------------------

    def _open_steps(self) -> None:
        while self.opened < len(self.work) and self.opened - self.version <= self.max_staleness:
            step = SimulatedStep(self.opened, self.work[self.opened], self.pool)
            if self.longest_first:
                step.queue = deque(self.foresight.starts(step))
            self.open.append(step)
            self.opened += 1
        self._admit()
        self._look()

    def _admit(self) -> None:
        """Free places go to the oldest step that has episodes waiting."""
        free = self._serving() * self.pool.capacity - sum(step.running for step in self.open)
        for step in self.open:
            while free > 0 and step.queued:
                step.start()
                free -= 1
            if step.queued:
                break

    def _end_episodes(self, step: SimulatedStep) -> None:
        finished: set[int] = set()
        for ended in step.end():
            self.foresight.observe(step.groups[ended.group].task, ended.active_s, ended.tokens)
            self.result.episodes += 1
            if not step.left[ended.group]:
                finished.add(ended.group)
        for group in sorted(finished):
            self._after(self.pool.grade_s, partial(self._process, step, group))
        self._admit()
        self._look()

    def _process(self, step: SimulatedStep, group: int) -> None:
        step.process(group)
        self._claim(step)
        self._look()

    # --- training -------------------------------------------------------------------------------------------------

    def _claim(self, step: SimulatedStep) -> None:
        """As `gyre.Step` does: an equal share of what waits to every idle trainer, a claim's worth at most."""
        ledger = step.ledger
        while ledger.waiting and ledger.idle:
            for trainer in ledger.idle:
                if not ledger.waiting:
                    break
                share = step.waiting_tokens // max(1, len(ledger.idle)) + 1
                limit = int(self.scheduler.claim_s * (step.measured_tokens_per_s or 1000.0))
                refs = ledger.claim(trainer.ready.incarnation, min(share, limit))
                tokens = ledger.tokens(refs)
                step.waiting_tokens -= tokens
                index = next(i for i, cell in enumerate(self.cells) if cell.name == trainer.ready.cell)
                self._mark(index, "train", step.number)
                seconds = tokens / self.pool.train_tokens_per_s
                self.result.train_s += seconds
                self._after(seconds, self._claimed(step, trainer.ready.incarnation, index, tokens, seconds))
        if step.complete and not step.finishing:
            step.finishing = True
            used = sum(bool(trainer.summed) for trainer in ledger.trainers.values() if trainer is not ledger.core)
            self._after(self.pool.update_s + used * self.pool.gather_s, lambda: self._close(step))

    def _claimed(
        self, step: SimulatedStep, incarnation: str, index: int, tokens: int, seconds: float
    ) -> Callable[[], None]:
        def done() -> None:
            step.ledger.done(incarnation)
            step.trained(tokens, seconds)
            if step.measured_tokens_per_s:
                self.tokens_per_s = step.measured_tokens_per_s
            self._mark(index, "wait", step.number)
            self._claim(step)
            self._look()

        return done

    def _close(self, step: SimulatedStep) -> None:
        self.version += 1
        self.open.remove(step)
        self.outlooks.pop(step.number, None)
        self.result.closed_s.append(self.now)
        self._open_steps()

    # --- roles ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if not self.pending_decision:
            self.pending_decision = True
            self._after(max(0.0, self.looked_at + self.pool.poll_s - self.now), self._decide)

    def _decide(self) -> None:
        self.pending_decision, self.looked_at = False, self.now
        decision = decide(self._view())
        self.result.decisions += 1
        changed = False
        for index, cell in enumerate(self.cells):
            wanted = decision.assignments[cell.name]
            keeps = wanted.step >= 0 or cell.version == self.version
            if wanted == cell.assigned and keeps:
                continue
            changed = True
            if (wanted.step < 0) != (cell.assigned.step < 0):
                self.result.switches += 1
                step = wanted.step if wanted.step >= 0 else cell.assigned.step
                self.result.switches_of_step[step] = self.result.switches_of_step.get(step, 0) + 1
            cell.assigned, cell.version = wanted, self.version
            if not cell.moving:
                self._move(index)
        self._check(decision.reason)
        if changed and self.timeline:
            self.result.reasons.append((self.now, decision.reason))

    def _check(self, reason: str) -> None:
        """Note what no policy may decide. A static split is free to serve with what it has."""
        if not self.open:
            return
        oldest = self.open[0]
        trainers = sum(cell.assigned.step == oldest.number for cell in self.cells)
        if not trainers and not oldest.unfinished and oldest.ledger.waiting:
            self.result.faults.append(f"{self.now:.1f} s, nobody trains: {reason}")
        places = sum(cell.assigned.step < 0 for cell in self.cells) * self.pool.capacity
        needed = min(oldest.running, len(self.cells) * self.pool.capacity)
        if places < needed and self.scheduler.policy != "async":
            self.result.faults.append(f"{self.now:.1f} s, too few serve: {reason}")

    def _move(self, index: int) -> None:
        """Bring a cell into the state that it was told: what `gyre.Cell` does until it holds."""
        cell, pool = self.cells[index], self.pool
        wanted, version = cell.assigned, cell.version
        if cell.holds.step < 0 <= wanted.step:
            seconds = pool.switch_out_s
            if pool.move_s:
                lost = pool.move_s / max(1, self._serving())
                for step in self.open:
                    step.stall(lost)
        elif wanted.step < 0 <= cell.holds.step:
            seconds = pool.switch_in_s
        elif wanted.step >= 0 and cell.holds.step == wanted.step:
            seconds = 0.0
        else:
            seconds = pool.publish_s
        cell.moving = True
        cell.incarnation += 1
        self._mark(index, "switch")

        def arrived() -> None:
            cell.moving, cell.holds, cell.holds_version = False, wanted, version
            if cell.assigned != wanted or (wanted.step < 0 and cell.version != version):
                self._move(index)
            elif wanted.step < 0:
                self._mark(index, "serve")
                self._admit()
            else:
                self._mark(index, "wait", wanted.step)
                self._join(cell, wanted)
            self._look()

        self._after(seconds, arrived)

    def _join(self, cell: SimulatedCell, wanted: Assignment) -> None:
        for step in self.open:
            if step.number == wanted.step:
                step.ledger.join(
                    TrainerReady(
                        cell=cell.name,
                        incarnation=f"{cell.name}#{wanted.step}",
                        epoch=cell.incarnation,
                        core=wanted.core,
                        running=0,
                    )
                )
                self._claim(step)

    def _mark(self, index: int, what: str, step: int = -1) -> None:
        start, before, of = self.since[index]
        if (what, step) == (before, of):
            return
        if self.timeline and self.now > start:
            self.result.segments.append(Segment(index, start, self.now, before, of))
        self.since[index] = (self.now, what, step)

    # --- what the policy sees -------------------------------------------------------------------------------------

    def _view(self) -> PoolView:
        pool = self.pool
        cells = [self._cell_view(cell) for cell in self.cells]
        steps = []
        for step in self.open:
            steps.append(
                StepView.model_construct(
                    step=step.number,
                    train=True,
                    unfinished=step.unfinished,
                    total=step.total,
                    ready=len(step.ledger.open_refs),
                    ready_tokens=step.open_tokens,
                    outlook=self._outlook(step) if self.predicts and self._room() else None,
                )
            )
        return PoolView.model_construct(
            run="simulated",
            cells=cells,
            steps=steps,
            capacity=pool.capacity,
            scheduler=self.scheduler,
            tokens_per_s=self.tokens_per_s,
            switch_out_s=pool.switch_out_s,
            switch_in_s=pool.switch_in_s,
            solo_speedup=pool.solo_speedup,
        )

    def _cell_view(self, cell: SimulatedCell) -> CellView:
        key = (cell.name, cell.assigned.step, cell.assigned.core)
        if key not in self.cell_views:
            self.cell_views[key] = CellView(cell=cell.name, training_step=cell.assigned.step, core=cell.assigned.core)
        return self.cell_views[key]

    def _room(self) -> bool:
        """Whether the policy has anything to choose: otherwise no forecast is made."""
        first = self.open[0] if self.open else None
        return first is not None and first.unfinished <= (len(self.cells) - 1) * self.pool.capacity

    def _outlook(self, step: SimulatedStep) -> Outlook:
        """Made anew when a group has ended or a while has passed."""
        known = self.outlooks.get(step.number)
        if known is not None and known[1] == step.processed and self.now < known[0]:
            return known[2]
        outlook = self.foresight.outlook(step)
        again = self.now + max(self.pool.poll_s, outlook.tail_s / 50)
        self.outlooks[step.number] = (again, step.processed, outlook)
        return outlook

    def _describe(self) -> str:
        cells = ", ".join(f"{cell.name} {cell.holds.step}" for cell in self.cells)
        steps = ", ".join(
            f"step {s.number}: {s.unfinished} unfinished, {len(s.ledger.waiting)} wait" for s in self.open
        )
        return f"{steps}; {cells}"


def best_split(
    pool: PoolModel, steps: Steps, scheduler: SchedulerConfig, *, max_staleness: int = 0, search_steps: int = 8
) -> int:
    """Training cells of the static split that finishes soonest, over the first ``search_steps`` steps."""
    if pool.cells == 1:
        return 1
    times: dict[int, float] = {}
    for training in range(1, pool.cells):
        split = scheduler.model_copy(update={"policy": "async", "training_cells": training})
        times[training] = simulate(pool, steps[:search_steps], split, max_staleness=max_staleness).total_s
    return min(times, key=lambda training: times[training])
