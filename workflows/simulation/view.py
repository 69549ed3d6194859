"""What a simulated scheduler sees: the same `PoolView` that production fills in, of the cells that are there.

Forecasts are made anew only when a group has ended or a while has passed, and only where a policy has a choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from workflows.contracts.configuration import SchedulerConfig
from workflows.scheduling.policies import FORECASTS_UNUSED
from workflows.scheduling.pool_view import CellView, Outlook, PoolView, StepView
from workflows.simulation.cells import SimulatedCell
from workflows.simulation.foresight import Foresight
from workflows.simulation.step import SimulatedStep
from workflows.simulation.workload import PoolModel


class Viewer:
    def __init__(self, pool: PoolModel, scheduler: SchedulerConfig, foresight: Foresight) -> None:
        self.pool, self.scheduler, self.foresight = pool, scheduler, foresight
        self.predicts = scheduler.policy not in FORECASTS_UNUSED
        self.outlooks: dict[int, tuple[float, int, Outlook]] = {}
        self.cell_views: dict[tuple[int, int, bool], CellView] = {}

    def view(
        self, now: float, cells: Sequence[SimulatedCell], steps: Sequence[SimulatedStep], tokens_per_s: float
    ) -> PoolView:
        pool = self.pool
        present = [self._cell(cell) for cell in cells if not cell.away]
        chooses = self.predicts and bool(steps) and steps[0].unfinished <= (len(present) - 1) * pool.capacity
        self.outlooks = {step.number: self.outlooks[step.number] for step in steps if step.number in self.outlooks}
        return PoolView.model_construct(
            run="simulated",
            cells=present,
            steps=[
                StepView.model_construct(
                    step=step.number,
                    train=True,
                    unfinished=step.unfinished,
                    total=step.total,
                    ready=len(step.ledger.open_refs),
                    ready_tokens=step.open_tokens,
                    outlook=self._outlook(now, step) if chooses else None,
                )
                for step in steps
            ],
            capacity=pool.capacity,
            scheduler=self.scheduler,
            tokens_per_s=tokens_per_s,
            switch_out_s=pool.switch_out_s,
            switch_in_s=pool.switch_in_s,
            solo_speedup=pool.solo_speedup,
        )

    def _cell(self, cell: SimulatedCell) -> CellView:
        key = (cell.index, cell.assigned.step, cell.assigned.core)
        if key not in self.cell_views:
            self.cell_views[key] = CellView(cell=cell.name, training_step=cell.assigned.step, core=cell.assigned.core)
        return self.cell_views[key]

    def _outlook(self, now: float, step: SimulatedStep) -> Outlook:
        known = self.outlooks.get(step.number)
        if known is not None and known[1] == step.processed and now < known[0]:
            return known[2]
        outlook = self.foresight.outlook(step)
        again = now + max(self.pool.poll_s, outlook.tail_s / 50)
        self.outlooks[step.number] = (again, step.processed, outlook)
        return outlook
