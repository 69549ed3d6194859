"""Policies side by side on the same work: the one thing that `gyre simulate` computes.

Every policy sees the same episodes on the same cells at the same staleness. ``async`` is the best static split found
by search. Both baselines are given what gyre has: a later step's episodes fill a tail, groups are trained as they
finish. *Batchwise*, as baselines are usually built, they roll out one step after the other, and a split that may be a
step behind trains a batch while the next one is rolled out; when on-policy, that is no different. ``clairvoyant`` is
the best schedule found with every duration known in advance; the lower bound is one that no schedule can beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from workflows.contracts.configuration import SchedulerConfig
from workflows.simulation.foresight import Clairvoyant
from workflows.simulation.run import Simulated
from workflows.simulation.simulator import Simulation
from workflows.simulation.workload import (
    OVERLAPPED,
    Bounds,
    Pipeline,
    PoolModel,
    SimulatedGroup,
    Steps,
    lower_bounds,
)

POLICIES: Final = ("colocate", "async", "watermark", "predictive")
BASELINES: Final = ("colocate", "async")


def batchwise(max_staleness: int) -> Pipeline:
    """Of a static split; a Colocate is no different for streaming, it trains when all episodes have ended."""
    return Pipeline(fills=False, streams=max_staleness == 0)


@dataclass
class Comparison:
    pool: PoolModel
    max_staleness: int
    steps: int
    runs: dict[str, Simulated]
    split: int
    """Training cells of `async`."""
    clairvoyant: Simulated
    bounds: Bounds
    gpus_per_cell: int = 0
    batchwise: dict[str, Simulated] = field(default_factory=dict)
    """The baselines without overlap across steps; empty where that is no different."""
    batchwise_split: int = 1

    def usual(self, baseline: str) -> Simulated:
        """The baseline as it is usually built."""
        return self.batchwise.get(baseline) or self.runs[baseline]

    def at_most(self, baseline: str) -> float:
        """Speed-up over the baseline that no schedule of this work exceeds."""
        return self.runs[baseline].total_s / self.bounds.bound_s

    def as_json(self) -> dict[str, Any]:
        return {
            "max_staleness": self.max_staleness,
            "steps": self.steps,
            "cells": self.pool.cells,
            "capacity": self.pool.capacity,
            "policies": {name: self.row(name, run) for name, run in self.runs.items()},
            "clairvoyant": {**self.row("clairvoyant", self.clairvoyant), "reached": self.reached()},
            "lower_bound": {
                "step_s": self.bounds.bound_s / self.steps,
                "work_s": self.bounds.work_s / self.steps,
                "chain_s": self.bounds.chain_s / self.steps,
            },
            "batchwise": {name: self.row(name, run) for name, run in self.batchwise.items()},
            "at_most": {name: self.at_most(name) for name in BASELINES if name in self.runs},
        }

    def reached(self) -> dict[str, float]:
        """Share of the clairvoyant schedule's speed that each policy reaches."""
        return {name: self.clairvoyant.total_s / run.total_s for name, run in self.runs.items()}

    def row(self, name: str, run: Simulated) -> dict[str, Any]:
        row: dict[str, Any] = {
            "total_s": run.total_s,
            "step_s": run.total_s / self.steps,
            "median_step_s": sorted(run.step_s)[len(run.step_s) // 2],
            "speedup": {over: self.runs[over].total_s / run.total_s for over in BASELINES if over in self.runs},
            "speedup_over_batchwise": {
                over: self.usual(over).total_s / run.total_s for over in BASELINES if over in self.runs
            },
            "utilisation": run.utilisation,
            "idle_cell_hours": run.idle_cell_s / 3600,
            "switches_per_step": run.switches / self.steps,
        }
        if self.gpus_per_cell:
            row["idle_gpu_hours"] = row["idle_cell_hours"] * self.gpus_per_cell
        if name == "async":
            row["training_cells"] = self.batchwise_split if run is self.batchwise.get(name) else self.split
        return row


def compare(
    pool: PoolModel,
    steps: Steps,
    *,
    max_staleness: int,
    policies: Sequence[str] = POLICIES,
    scheduler: SchedulerConfig | None = None,
    split: int | None = None,
    gpus_per_cell: int = 0,
    timeline: bool = False,
) -> Comparison:
    """``split``: training cells of `async`; None: the best, of each of its two ways."""
    base = scheduler or priced(pool)

    def run(policy: str, cells: int, pipeline: Pipeline = OVERLAPPED) -> Simulated:
        config = configured(base, policy, cells)
        return Simulation(pool, steps, config, max_staleness, pipeline=pipeline, timeline=timeline).run()

    def best(pipeline: Pipeline) -> int:
        searched = split is None and "async" in policies
        return best_split(pool, steps, base, max_staleness=max_staleness, pipeline=pipeline) if searched else split or 1

    own_split, usual_split, usual = best(OVERLAPPED), split or 1, {}
    if max_staleness and set(BASELINES) <= set(policies):
        pipeline = batchwise(max_staleness)
        usual_split = best(pipeline)
        usual = {name: run(name, usual_split, pipeline) for name in BASELINES}
    runs = {policy: run(policy, own_split) for policy in policies}
    known = clairvoyant(pool, steps, base, max_staleness)
    return Comparison(
        pool=pool,
        max_staleness=max_staleness,
        steps=len(steps),
        runs=runs,
        split=own_split,
        clairvoyant=min([known, *runs.values()], key=lambda run: run.total_s),
        bounds=lower_bounds(pool, steps, max_staleness),
        gpus_per_cell=gpus_per_cell,
        batchwise=usual,
        batchwise_split=usual_split,
    )


def priced(pool: PoolModel) -> SchedulerConfig:
    """The default configuration, with what `satellite_s` stands for as it is in this pool: about twice a switch."""
    return SchedulerConfig(satellite_s=2 * max(pool.switch_out_s, pool.switch_in_s))


def configured(base: SchedulerConfig, policy: str, training_cells: int = 1) -> SchedulerConfig:
    return base.model_copy(update={"policy": policy, "training_cells": training_cells})


def clairvoyant(pool: PoolModel, steps: Steps, base: SchedulerConfig, max_staleness: int) -> Simulated:
    """The best of what the policies find when durations are known and the longest episodes start first."""
    longest = [
        [SimulatedGroup(group.task, tuple(sorted(group.episodes, reverse=True))) for group in groups]
        for groups in steps
    ]
    runs = []
    for policy, whole_groups in (
        ("predictive", False),
        ("predictive", True),
        ("watermark", False),
        ("colocate", False),
    ):
        foresight = Clairvoyant(pool, whole_groups=whole_groups)
        config = configured(base, policy)
        runs.append(Simulation(pool, longest, config, max_staleness, foresight, longest_first=True).run())
    return min(runs, key=lambda run: run.total_s)


def best_split(
    pool: PoolModel,
    steps: Steps,
    scheduler: SchedulerConfig,
    *,
    max_staleness: int = 0,
    pipeline: Pipeline = OVERLAPPED,
    search_steps: int = 8,
) -> int:
    """Training cells of the static split that finishes soonest, over the first ``search_steps`` steps."""

    def seconds(training: int) -> float:
        config = configured(scheduler, "async", training)
        return Simulation(pool, steps[:search_steps], config, max_staleness, pipeline=pipeline).run().total_s

    return min(range(1, pool.cells), key=seconds) if pool.cells > 1 else 1
