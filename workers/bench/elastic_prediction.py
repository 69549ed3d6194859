"""What the simulator says of the steps that ``gyre bench elastic`` has measured, from the trace of one policy's runs.

The trace is of runs in which the episodes of a step had all cells (`colocate`, where it was measured); what cells cost
is measured (``elastic_history``). Every policy is then simulated on the same episodes: no time of its own is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from activities.trajectories import unpack_records
from infra.blobs import BlobStore
from trajectory.records import decode_chain
from workers.bench.elastic_history import Costs
from workers.episodes import sealed_episodes
from workers.simulate.export import export_trace
from workers.simulate.trace import TracedEpisode, read_trace, steps_of
from workflows.configuration import SchedulerConfig
from workflows.simulated_work import PoolModel
from workflows.simulator import simulate


class Call(NamedTuple):
    at: float
    """Unix seconds at which it came."""
    seconds: float
    """Until its answer, without what the proxy held it for."""


class Traced(NamedTuple):
    """A run whose trace is simulated."""

    episodes: list[TracedEpisode]
    calls: list[Call]


def trace_of(blobs: BlobStore, run: str, file: Path) -> Traced:
    seals = sealed_episodes(blobs, run, None)
    export_trace(blobs, run, seals, file)
    calls = []
    for seal in seals:
        records = decode_chain(unpack_records(blobs.get(seal["records_ref"]))) if seal["records_ref"] else []
        calls += [Call(record.started_at, record.active_s) for record in records]
    return Traced(read_trace(file), calls)


def solo_speedup(traced: Sequence[Traced], places: int) -> float:
    """How much faster an episode goes on alone on a cell than on a full one.

    A call's seconds against the share of ``places`` that was taken when it came, by least squares; a turn's tool time
    is the same in any company.
    """
    points, tool_s = [], 0.0
    for run in traced:
        spans = [(e.start or 0.0, (e.start or 0.0) + e.wall_s) for e in run.episodes]
        for call in run.calls:
            running = sum(start <= call.at <= end for start, end in spans)
            points.append((min(1.0, running / places), call.seconds))
        tool_s += sum(e.active_s for e in run.episodes) - sum(call.seconds for call in run.calls)
    if not points:
        return 1.0
    x_mean, y_mean = mean(x for x, _ in points), mean(y for _, y in points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / spread if spread else 0.0
    alone = max(0.0, y_mean - slope * x_mean) + max(0.0, tool_s / len(points))
    return max(1.0, (alone + slope) / alone) if alone else 1.0


def pool_model(costs: Costs, *, cells: int, capacity: int, slots: int, solo: float) -> PoolModel:
    return PoolModel(cells=cells, capacity=capacity, slots=slots, solo_speedup=solo, poll_s=0.1, **asdict(costs))


def predicted_s(run: Traced, pool: PoolModel, scheduler: SchedulerConfig, staleness: int) -> list[float]:
    """Seconds of each step after the warm-up, as the benchmark measures them."""
    # The trace's seconds are the harness's own; what surrounds them is start-up, which the pool counts.
    started = [
        episode.model_copy(
            update={"active_s": episode.active_s + pool.start_s, "wall_s": episode.wall_s + pool.start_s}
        )
        for episode in run.episodes
    ]
    simulated = simulate(pool, steps_of(started, pool), scheduler, max_staleness=staleness)
    return simulated.step_s[1:]


def compared(measured: float, predicted: float) -> dict[str, Any]:
    return {"measured_s": measured, "predicted_s": predicted, "error": predicted / measured - 1}
