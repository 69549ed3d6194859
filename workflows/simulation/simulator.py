"""A discrete-event simulation of a run: the policies, the gradient ledger and the rules of production, without servers.

What decides is production's own code: `workflows.scheduling.policies.decide` on a `PoolView`, and `GradientLedger`,
with claims cut as `gyre.Step` cuts them. What it decides about is simulated: serving cells give their places to the
oldest step first, a cell changes role in the measured time, a trainer stays with its step until that is closed, an
update waits for every micro-step, step k opens when k − trained version ≤ ``max_staleness``.

Deterministic: the same inputs give the same run. It knows nothing of tokens one by one, prefixes or the network.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Final

from workflows.contracts.configuration import SchedulerConfig
from workflows.contracts.orders import TrainerReady
from workflows.scheduling.policies import FORECASTS_UNUSED, decide
from workflows.scheduling.pool_view import TOKENS_PER_S, Assignment
from workflows.simulation.cells import Record, SimulatedCell
from workflows.simulation.foresight import Foresight, Learned
from workflows.simulation.run import Simulated
from workflows.simulation.step import SimulatedStep
from workflows.simulation.view import Viewer
from workflows.simulation.workload import OVERLAPPED, Absence, Pipeline, PoolModel, Steps

FIRST_TOKENS_PER_S: Final = 1000.0
"""By which a run's first claim is measured (`StepInput.tokens_per_s`)."""


class Stranded(RuntimeError):
    """Nothing more would ever happen, and work is left: a policy has stranded it."""


class Simulation:
    """One run of all ``steps``. ``longest_first``: admit the groups expected to take longest first; None: the policy's
    way. ``timeline``: also note what each cell does when, and the reasons of decisions."""

    def __init__(
        self,
        pool: PoolModel,
        steps: Steps,
        scheduler: SchedulerConfig,
        max_staleness: int = 0,
        foresight: Foresight | None = None,
        *,
        longest_first: bool | None = None,
        pipeline: Pipeline = OVERLAPPED,
        timeline: bool = False,
    ) -> None:
        self.pool, self.work, self.scheduler, self.max_staleness = pool, steps, scheduler, max_staleness
        self.foresight: Foresight = foresight or Learned(pool)
        self.longest_first = scheduler.policy not in FORECASTS_UNUSED if longest_first is None else longest_first
        self.pipeline, self.timeline = pipeline, timeline
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.serials = count()
        self.cells = [SimulatedCell(index) for index in range(pool.cells)]
        self.open: list[SimulatedStep] = []
        self.version = self.opened = 0
        self.tokens_per_s = TOKENS_PER_S
        self.step_tokens_per_s = FIRST_TOKENS_PER_S
        """Of the last step that was closed."""
        self.pending_decision = False
        self.looked_at = -math.inf
        self.result = Simulated(scheduler.policy, cells=pool.cells)
        self.record = Record(self.result, timeline=timeline)
        self.viewer = Viewer(pool, scheduler, self.foresight)

    # --- time -----------------------------------------------------------------------------------------------------

    def run(self) -> Simulated:
        """Raises Stranded when a policy leaves work that would never be done."""
        for absence in self.pool.absences:
            self._at(absence.at_s, partial(self._leave, absence))
            self._at(absence.at_s + absence.for_s, partial(self._come, absence))
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
        self._at(self.now + seconds, act)

    def _at(self, at: float, act: Callable[[], None]) -> None:
        if at < math.inf:
            heappush(self.events, (at, next(self.serials), act))

    def _serving(self) -> int:
        return sum(cell.serves for cell in self.cells)

    def _rates(self) -> float:
        """Set every step's rates; returns the cells' worth of work that is being done."""
        serving = self._serving()
        seats = serving * self.pool.capacity
        left = self.pool.slots or seats
        for step in self.open:
            taken = min(step.running, left)
            step.share = taken / step.running if step.running else 0.0
            left -= taken
        if not seats:
            return 0.0
        occupied = ((self.pool.slots or seats) - left) / seats
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
            if self.pool.open_s:
                self._after(self.pool.open_s, partial(self._open, self.opened))
            else:
                self._open(self.opened)
            self.opened += 1

    def _open(self, number: int) -> None:
        step = SimulatedStep(number, self.work[number], self.pool)
        if self.longest_first:
            step.queue = deque(self.foresight.starts(step))
        self.open.append(step)
        self.result.opened_at.append((number, self.version))
        self._admit()
        self._look()

    def _admit(self) -> None:
        """Free places go to the oldest step that has episodes waiting."""
        free = (self.pool.slots or self._serving() * self.pool.capacity) - sum(step.placed for step in self.open)
        for step in self.open:
            while free > 0 and step.queued:
                step.start()
                free -= 1
                if self.pool.start_s:
                    self._after(self.pool.start_s, step.begin)
                else:
                    step.begin()
            if step.queued or (step.unfinished and not self.pipeline.fills):
                break

    def _end_episodes(self, step: SimulatedStep) -> None:
        finished: set[int] = set()
        for ended in step.end():
            self.foresight.observe(step.groups[ended.group].task, ended.active_s, ended.tokens)
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
        """As `gyre.Step` does."""
        ledger = step.ledger
        if not self.pipeline.streams and step.processed < len(step.groups):
            return
        while ledger.waiting and ledger.idle:
            for trainer in ledger.idle:
                if not ledger.waiting:
                    break
                claim_tokens = self.scheduler.claim_s * (step.measured_tokens_per_s or self.step_tokens_per_s)
                tokens = ledger.tokens(ledger.claim(trainer.ready.incarnation, claim_tokens))
                index = next(cell.index for cell in self.cells if cell.name == trainer.ready.cell)
                self._mark(index, "train", step.number)
                seconds = tokens / self.pool.train_tokens_per_s + self.pool.claim_overhead_s
                self.result.train_s += seconds
                self._after(seconds, partial(self._claimed, step, trainer.ready.incarnation, index, tokens, seconds))
        if step.complete and not step.finishing:
            step.finishing = True
            used = sum(bool(trainer.summed) for trainer in ledger.trainers.values() if trainer is not ledger.core)
            self._after(self.pool.update_s + used * self.pool.gather_s, partial(self._updated, step, step.updates))

    def _claimed(self, step: SimulatedStep, incarnation: str, index: int, tokens: int, seconds: float) -> None:
        """A claim has been trained, unless its replica was lost meanwhile."""
        if incarnation not in step.ledger.trainers:
            self.result.redone_tokens += tokens
            return
        step.ledger.done(incarnation)
        step.trained(tokens, seconds)
        self.tokens_per_s = step.measured_tokens_per_s or self.tokens_per_s
        self._mark(index, "wait", step.number)
        self._claim(step)
        self._look()

    def _updated(self, step: SimulatedStep, update: int) -> None:
        if update != step.updates or step not in self.open:
            return
        self.version += 1
        self.step_tokens_per_s = step.measured_tokens_per_s or self.step_tokens_per_s
        self.open.remove(step)
        self.result.closed_s.append(self.now)
        self.result.episodes_of[step.number] = step.total - step.unfinished
        for cell in self.cells:
            if cell.leaving:
                self._gone(cell)
        self._open_steps()
        self._look()

    def _lose(self, cell: SimulatedCell) -> None:
        """What it has summed for open steps waits again."""
        for step in self.open:
            incarnation = cell.incarnation(step.number)
            self.result.redone_tokens += step.lose(incarnation)
            self._claim(step)

    # --- cells that come and go -----------------------------------------------------------------------------------

    def _leave(self, absence: Absence) -> None:
        cell = self.cells[absence.cell]
        if absence.asked and any(step.number == cell.assigned.step for step in self.open):
            cell.leaving = True
        else:
            self._gone(cell)

    def _gone(self, cell: SimulatedCell) -> None:
        if cell.serves:
            self._stall()
        cell.leave()
        self._lose(cell)
        self._mark(cell.index, "away")
        self._look()

    def _come(self, absence: Absence) -> None:
        cell = self.cells[absence.cell]
        if cell.away:
            cell.come()
        cell.leaving = False
        self._look()

    # --- roles ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if not self.pending_decision:
            self.pending_decision = True
            self._after(max(0.0, self.looked_at + self.pool.poll_s - self.now), self._decide)

    def _decide(self) -> None:
        self.pending_decision, self.looked_at = False, self.now
        decision = decide(self.viewer.view(self.now, self.cells, self.open, self.tokens_per_s))
        changed = False
        for cell in self.cells:
            if cell.away:
                continue
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
                self._move(cell)
        if changed and self.timeline:
            self.result.reasons.append((self.now, decision.reason))

    def _stall(self) -> None:
        """What a cell that doesn't serve any more held is computed again on the others."""
        if self.pool.move_s:
            lost = self.pool.move_s / max(1, self._serving())
            for step in self.open:
                step.stall(lost)

    def _move(self, cell: SimulatedCell) -> None:
        """Bring a cell into the state that it was told: what `gyre.Cell` does until it holds."""
        pool, wanted, version, life = self.pool, cell.assigned, cell.version, cell.life
        trained = cell.holds.step >= 0
        if cell.cold:
            seconds = pool.switch_in_s if wanted.step < 0 else pool.switch_out_s
        elif not trained and wanted.step >= 0:
            seconds = pool.switch_out_s
            self._stall()
        elif trained and wanted.step < 0:
            seconds = pool.switch_in_s
            if any(step.number == cell.holds.step for step in self.open):
                self._lose(cell)
                cell.life = life = life + 1
        elif trained and cell.holds.step == wanted.step:
            seconds = pool.switch_out_s if wanted.core and not cell.holds.core else 0.0
        else:
            seconds = pool.publish_s
        cell.moving = True
        cell.epoch += 1
        self._mark(cell.index, "switch")

        def arrived() -> None:
            if cell.life != life or cell.away:
                return
            cell.moving, cell.cold, cell.holds = False, False, wanted
            if cell.assigned != wanted or (wanted.step < 0 and cell.version != version):
                self._move(cell)
            elif wanted.step < 0:
                self._mark(cell.index, "serve")
                self._admit()
            else:
                self._mark(cell.index, "wait", wanted.step)
                self._join(cell, wanted)
            self._look()

        self._after(seconds, arrived)

    def _join(self, cell: SimulatedCell, wanted: Assignment) -> None:
        for step in self.open:
            if step.number == wanted.step:
                step.ledger.join(
                    TrainerReady(
                        cell=cell.name,
                        incarnation=cell.incarnation(wanted.step),
                        epoch=cell.epoch,
                        core=wanted.core,
                        running=0,
                    )
                )
                self._claim(step)

    def _mark(self, index: int, what: str, step: int = -1) -> None:
        self.record.mark(self.now, index, what, step)

    def _describe(self) -> str:
        cells = ", ".join(f"{cell.name} {'away' if cell.away else cell.holds.step}" for cell in self.cells)
        steps = ", ".join(
            f"step {s.number}: {s.unfinished} unfinished, {len(s.ledger.waiting)} wait" for s in self.open
        )
        return f"{steps}; {cells}"
