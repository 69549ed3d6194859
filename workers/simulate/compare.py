"""Policies side by side on the same work: the one thing that `gyre simulate` computes.

Every policy sees the same episodes on the same cells at the same staleness. ``async`` is the best static split found
by search; ``clairvoyant`` is the best schedule found with every duration known in advance; the lower bound is one that
no schedule can beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from workflows.configuration import SchedulerConfig
from workflows.foresight import Clairvoyant
from workflows.simulated_run import Simulated
from workflows.simulated_work import Bounds, PoolModel, SimulatedGroup, Steps, lower_bounds
from workflows.simulator import best_split, simulate

POLICIES: Final = ("colocate", "async", "watermark", "predictive")
BASELINES: Final = ("colocate", "async")


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
    notes: list[str] = field(default_factory=list)

    def speedup(self, policy: str, over: str) -> float:
        return self.runs[over].total_s / self.runs[policy].total_s

    def static_split(self, work: Steps, training_cells: int) -> Simulated:
        """`async` with a split that is not the best one, on the same work."""
        config = priced(self.pool).model_copy(update={"policy": "async", "training_cells": training_cells})
        return simulate(self.pool, work, config, max_staleness=self.max_staleness)

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
            "notes": self.notes,
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
            "utilisation": run.utilisation,
            "idle_cell_hours": run.idle_cell_s / 3600,
            "switches_per_step": run.switches / self.steps,
        }
        if self.gpus_per_cell:
            row["idle_gpu_hours"] = row["idle_cell_hours"] * self.gpus_per_cell
        if name == "async":
            row["training_cells"] = self.split
        return row


def compare(
    pool: PoolModel,
    steps: Steps,
    *,
    max_staleness: int,
    policies: Sequence[str] = POLICIES,
    scheduler: SchedulerConfig | None = None,
    gpus_per_cell: int = 0,
    timeline: bool = False,
) -> Comparison:
    base = scheduler or priced(pool)
    split = best_split(pool, steps, base, max_staleness=max_staleness) if "async" in policies else 1
    runs = {}
    for policy in policies:
        config = base.model_copy(update={"policy": policy, "training_cells": split})
        runs[policy] = simulate(pool, steps, config, max_staleness=max_staleness, timeline=timeline)
    known = clairvoyant(pool, steps, base, max_staleness)
    return Comparison(
        pool=pool,
        max_staleness=max_staleness,
        steps=len(steps),
        runs=runs,
        split=split,
        clairvoyant=min([known, *runs.values()], key=lambda run: run.total_s),
        bounds=lower_bounds(pool, steps, max_staleness),
        gpus_per_cell=gpus_per_cell,
    )


def priced(pool: PoolModel) -> SchedulerConfig:
    """The default configuration, with what `satellite_s` stands for as it is in this pool: about twice a switch."""
    return SchedulerConfig(satellite_s=2 * max(pool.switch_out_s, pool.switch_in_s))


def clairvoyant(pool: PoolModel, steps: Steps, base: SchedulerConfig, max_staleness: int) -> Simulated:
    """The best of what the policies find when durations are known and the longest episodes start first."""
    longest = [
        [SimulatedGroup(group.task, tuple(sorted(group.episodes, reverse=True))) for group in groups]
        for groups in steps
    ]
    found = []
    for policy, whole_groups in (
        ("predictive", False),
        ("predictive", True),
        ("watermark", False),
        ("colocate", False),
    ):
        config = base.model_copy(update={"policy": policy})
        foresight = Clairvoyant(pool, whole_groups=whole_groups)
        found.append(
            simulate(pool, longest, config, max_staleness=max_staleness, foresight=foresight, longest_first=True)
        )
    return min(found, key=lambda run: run.total_s)
