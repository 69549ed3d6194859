"""``bench elastic``: the scheduling policies on real cells, side by side, and what the simulator says of them.

Every cell is held to its CPU quota; the policies take turns on the same stack, in a seeded order for each round, each
on the same seeded episodes; what counts is the median wall time of a step. The baseline is the better of `colocate` and
the best static split of all that are possible, found by measuring each.

It does not know how a run is made (``runs``), what work there is (``tasks``) or how costs are measured
(``history``).
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

from pydantic import Field
from rich.console import Console
from temporalio.client import Client

from infra.quota import left_over
from infra.state.blobs import BlobStore
from tests.bench.elastic import runs
from tests.bench.elastic.history import CellSwitches, StepCosts, costs_of, history_of, step_costs, switches
from tests.bench.elastic.prediction import compared, pool_model, predicted_s, speed_law, trace_of
from tests.bench.elastic.tasks import StepShape, StepWork, draw_step, warm_up, write_tasks
from tests.processes import free_settings
from workers.errors import UsageError
from workers.stack.processes import quota_name
from workflows import names
from workflows.contracts.configuration import Contract, SchedulerConfig

ELASTIC: Final = ("predictive", "watermark")
"""The first that is measured is held against the baselines."""
FASTER: Final = 1.25
NEAR: Final = 0.10
ENOUGH: Final = 5
"""Steps whose median counts."""
LONGEST_RUN_S: Final = 600.0


class ElasticBenchPlan(Contract):
    policies: tuple[str, ...] = ("predictive", "colocate", "async", "watermark")
    """`async` stands for every static split."""
    rounds: int = Field(default=5, ge=1)
    steps: int = Field(default=1, ge=1)
    """MeasuredRun steps of a run; where steps overlap it takes several."""
    staleness: int = Field(default=0, ge=0, le=2)
    cells: int = Field(default=3, ge=2)
    cell_cpu: float = Field(default=0.3, gt=0)
    capacity: int = Field(default=16, ge=1)
    """Episodes of one cell, which the policies count with: as many cells as there are hold all episodes of a step."""
    claim_s: float = 8.0
    satellite_s: float = 3.0
    solo_speedup: float = 2.0
    """What `predictive` is told; the pool that is simulated has the one that was measured."""
    token_budget: int = 4096
    """Of a micro-step."""
    seed: int = 0
    minutes: float = 40.0
    """No round is begun that would not end within this time."""
    shape: StepShape = StepShape()

    def variants(self) -> list[str]:
        """Every policy that is measured: `async-N` trains on N cells."""
        variants: list[str] = []
        for policy in self.policies:
            if policy == "async":
                variants += [f"async-{split}" for split in range(1, self.cells)]
            else:
                variants.append(policy)
        return variants

    def scheduler(self, variant: str) -> SchedulerConfig:
        policy, _, split = variant.partition("-")
        return SchedulerConfig.model_validate(
            {
                "policy": policy,
                "training_cells": int(split or 1),
                "claim_s": self.claim_s,
                "satellite_s": self.satellite_s,
                "solo_speedup": self.solo_speedup,
            }
        )


SMALL: Final = {
    "policies": ("watermark", "colocate"),
    "rounds": 1,
    "cells": 2,
    "capacity": 8,
    "shape": {"groups": 3, "group_size": 3, "turns": 3, "words": 60, "tool_s": 0.5, "tail_groups": 1},
}
"""A run of a minute or two that shows that every part works; its figures mean nothing."""


class ElasticBench:
    def __init__(self, plan: ElasticBenchPlan, policy: Path, home: Path, port_base: int | None, say: runs.Say) -> None:
        self.plan, self.home, self.say = plan, home, say
        self.settings = free_settings(
            home,
            port_base,
            policy=policy,
            cells=plan.cells,
            cell_cpu=plan.cell_cpu,
            cell_capacity=plan.capacity,
            harness_slots=plan.cells * plan.capacity,
            kv_tokens=131072,
        )
        self.measured: list[runs.MeasuredRun] = []
        self.used: dict[str, list[float]] = {}
        """Share of the cells' quota that was used, by policy and run."""

    async def run(self) -> dict[str, Any]:
        """Everything, from an empty home to figures; nothing runs afterwards."""
        began = time.monotonic()
        async with runs.stack(self.settings, self.say) as client:
            up_s = time.monotonic() - began
            await self._rounds(client, began)
            costs = await self._costs(client)
        return {**costs, "up_s": up_s, "wall_s": time.monotonic() - began}

    async def _rounds(self, client: Client, began: float) -> None:
        plan, last_s = self.plan, 0.0
        for number in range(plan.rounds):
            left_s = plan.minutes * 60 - (time.monotonic() - began)
            if last_s > left_s:
                self.say(f"round {number} would take {last_s:.0f} s and {left_s:.0f} s are left")
                break
            round_began = time.monotonic()
            order = plan.variants()
            random.Random(f"order/{plan.seed}/{number}").shuffle(order)
            tasks = self.home / "tasks" / str(number)
            steps = [draw_step(plan.shape, seed=plan.seed + number, step=step) for step in range(plan.steps)]
            work: list[StepWork] = [warm_up(plan.shape), *steps]
            write_tasks(tasks, {self._name(variant, number): work for variant in order})
            for variant in order:
                await self._run(client, variant, number, tasks)
            last_s = time.monotonic() - round_began

    async def _run(self, client: Client, variant: str, number: int, tasks: Path) -> None:
        plan, name = self.plan, self._name(variant, number)
        quotas = left_over(quota_name(self.settings))
        before, began = sum(quota.cpu_s() for quota in quotas), time.monotonic()
        config = runs.run_config(
            name,
            self.settings,
            tasks,
            plan.scheduler(variant),
            group_size=plan.shape.group_size,
            staleness=plan.staleness,
            token_budget=plan.token_budget,
        )
        results = await runs.run_steps(client, self.settings, config, [plan.shape.groups] * plan.steps, LONGEST_RUN_S)
        whole_s = time.monotonic() - began
        used = sum(quota.cpu_s() for quota in quotas) - before
        self.used.setdefault(variant, []).append(used / (plan.cells * plan.cell_cpu * whole_s))
        seconds = [result.seconds for result in results]
        if plan.staleness:
            seconds = await runs.closings(client, name, plan.steps)
        lost = [result.step for result in results if result.valid < result.episodes]
        if lost:
            raise UsageError(f"run {name}: episodes of step {lost[0]} failed: gyre episodes {name}")
        self.measured.append(runs.MeasuredRun(variant, number, name, seconds, results))
        self.say(f"round {number} {variant:<12} {', '.join(f'{s:.1f}' for s in seconds)} s")

    @staticmethod
    def _name(variant: str, number: int) -> str:
        return f"{variant}-r{number}"

    # --- figures --------------------------------------------------------------------------------------------------

    async def _costs(self, client: Client) -> dict[str, Any]:
        plan = self.plan
        histories = [await history_of(client, names.cell_id(cell)) for cell in self.settings.cell_names()]
        cells = [switches(history) for history in histories]
        source = "colocate" if "colocate" in plan.variants() else plan.variants()[0]
        costs: list[StepCosts] = []
        rows = {variant: self._row(variant) for variant in plan.variants()}
        for run in self.measured:
            costs += [await step_costs(client, run.name, result.step) for result in run.results]
        return await asyncio.to_thread(self._compare, rows, costs, cells, source)

    def _row(self, variant: str) -> dict[str, Any]:
        runs_of = [run for run in self.measured if run.policy == variant]
        seconds = [s for run in runs_of for s in run.seconds]
        return {
            "step_s": seconds,
            "median_s": median(seconds) if seconds else None,
            "cpu_used_of_quota": self.used.get(variant, []),
            "satellites": [len(result.satellites) for run in runs_of for result in run.results],
            "moved_calls": [result.moved_calls for run in runs_of for result in run.results],
            "running_at_first_switch": [
                result.episodes_running_at_first_switch for run in runs_of for result in run.results
            ],
        }

    def _compare(
        self, rows: dict[str, dict[str, Any]], of_steps: list[StepCosts], cells: list[CellSwitches], source: str
    ) -> dict[str, Any]:
        plan = self.plan
        costs = costs_of(of_steps, cells)
        blobs = BlobStore(self.settings.blobs)
        traces = self.home / "traces"
        traced = {
            run.round: trace_of(blobs, run.name, traces / f"{run.name}.jsonl")
            for run in self.measured
            if run.policy == source
        }
        speed = speed_law(list(traced.values()), cells=plan.cells, capacity=plan.capacity)
        slots = self.settings.harness_slots
        pool = pool_model(costs, speed, cells=plan.cells, capacity=plan.capacity, slots=slots)
        for variant, row in rows.items():
            predictions = [
                s for run in traced.values() for s in predicted_s(run, pool, plan.scheduler(variant), plan.staleness)
            ]
            row["predicted_s"] = predictions
            row["prediction"] = compared(row["median_s"], median(predictions))
        counted = {
            "out": [round(c.seconds, 3) for cell in cells for c in cell.out],
            "back": [round(c.seconds, 3) for cell in cells for c in cell.back],
            "publish": [round(c.seconds, 3) for cell in cells for c in cell.publish],
        }
        result = {
            "plan": plan.model_dump(),
            "quota": {"cells": plan.cells, "cores_each": plan.cell_cpu},
            "policies": rows,
            "trace_of": source,
            "pool": pool.model_dump(mode="json"),
            "costs": asdict(costs),
            "switches_s": counted,
            "traces": str(traces),
        }
        return result | judged(rows)


def judged(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """SpeedLaw-ups, and each limit with what was measured and whether it holds."""
    medians: dict[str, float] = {name: row["median_s"] for name, row in rows.items()}
    elastic = next((name for name in ELASTIC if name in medians), "")
    splits = {name: seconds for name, seconds in medians.items() if name.startswith("async-")}
    best = min(splits, key=lambda name: splits[name], default="")
    limits = []

    def limit(what: str, value: float, holds: bool) -> None:
        limits.append({"limit": what, "value": round(value, 4), "holds": holds})

    speedups: dict[str, dict[str, float]] = {
        name: {over: medians[over] / medians[name] for over in ("colocate", best) if over in medians}
        for name in ELASTIC
        if name in medians
    }
    for over, faster in speedups.get(elastic, {}).items():
        limit(f"{elastic} is at least {FASTER} times as fast as {over}", faster, faster >= FASTER)
    steps = min(len(row["step_s"]) for row in rows.values())
    limit(f"at least {ENOUGH} steps of each policy", steps, steps >= ENOUGH)
    for name, row in rows.items():
        error = row["prediction"]["error"]
        limit(f"the simulator is within {NEAR:.0%} of {name}", error, abs(error) <= NEAR)
    return {
        "elastic": elastic,
        "best_async": best,
        "speedup": speedups,
        "limits": limits,
        "holds": all(limit["holds"] for limit in limits),
    }


def show_result(result: dict[str, Any], console: Console) -> None:
    for name, row in result["policies"].items():
        prediction = row["prediction"]
        console.print(
            f"{name:<12} {row['median_s']:7.1f} s a step ({', '.join(f'{s:.1f}' for s in row['step_s'])}); simulated "
            f"{prediction['predicted_s']:.1f} s ({prediction['error']:+.1%})",
            highlight=False,
        )
    for name, over in result["speedup"].items():
        speedups = ", ".join(f"{faster:.2f}× over {other}" for other, faster in over.items())
        console.print(f"{name}: {speedups}", highlight=False)
    for limit in result["limits"]:
        mark = "[green]holds[/]" if limit["holds"] else "[red]fails[/]"
        console.print(f"{mark} {limit['limit']}: {limit['value']:.3f}", highlight=False)
