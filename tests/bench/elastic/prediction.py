"""What the simulator says of the steps that ``bench elastic`` has measured, from the trace of one policy's runs.

The trace is of runs in which the episodes of a step had all cells (`colocate`, where it was measured). What cells cost
is measured over all runs (``history``). Every policy is then simulated on the same episodes: no length of an
episode or of a step of its own is used.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from activities.trajectories import unpack_records
from infra.state.blobs import BlobStore
from tests.bench.elastic.history import MeasuredCosts
from trajectory.records import decode_chain
from workers.records.episodes import sealed_episodes
from workers.records.traces import TracedEpisode, export_trace, read_trace
from workers.simulate.trace import steps_of
from workflows.contracts.configuration import SchedulerConfig
from workflows.simulation.simulator import Simulation
from workflows.simulation.workload import PoolModel


class TracedCall(NamedTuple):
    at: float
    """Unix seconds at which it came."""
    seconds: float
    """Until its answer, without what the proxy held it for."""


class TracedRun(NamedTuple):
    """A run whose trace is simulated."""

    episodes: list[TracedEpisode]
    calls: list[TracedCall]


def trace_of(blobs: BlobStore, run: str, file: Path) -> TracedRun:
    seals = sealed_episodes(blobs, run, None)
    export_trace(blobs, run, seals, file)
    calls = []
    for seal in seals:
        records = decode_chain(unpack_records(blobs.get(seal["records_ref"]))) if seal["records_ref"] else []
        calls += [TracedCall(record.started_at, record.active_s) for record in records]
    return TracedRun(read_trace(file), calls)


class SpeedLaw(NamedTuple):
    """How company slows episodes (``PoolModel.speed``)."""

    solo_speedup: float
    tool_share: float


def speed_law(traced: Sequence[TracedRun], *, cells: int, capacity: int) -> SpeedLaw:
    """From calls' seconds against the calls that a cell answered meanwhile, by least squares, and from tool time.

    A cell answers fewer calls at once than it has episodes: the others are at their tools, the more the faster it is.
    """
    points, tool_s = [], 0.0
    for run in traced:
        points += [(others / cells, call.seconds) for call, others in zip(run.calls, at_once(run.calls), strict=True)]
        tool_s += sum(episode.active_s for episode in run.episodes) - sum(call.seconds for call in run.calls)
    if not points:
        return SpeedLaw(1.0, 0.0)
    tools = max(0.0, tool_s / len(points))
    x_mean, y_mean = mean(x for x, _ in points), mean(y for _, y in points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / spread if spread else 0.0
    slope = min(max(0.0, slope), y_mean / x_mean)
    alone = y_mean - slope * x_mean
    # Of a full cell's episodes the share calls / (tools + calls) wait for an answer.
    half = (alone + slope * capacity - tools) / 2
    calls = half + math.sqrt(half * half + alone * tools)
    whole = tools + calls
    return SpeedLaw(max(1.0, whole / max(1e-6, tools + alone)), tools / whole if whole else 0.0)


def at_once(calls: Sequence[TracedCall]) -> list[float]:
    """How many calls, itself among them, were being answered on average while each was."""
    points = sorted([(call.at, 1) for call in calls] + [(call.at + call.seconds, -1) for call in calls])
    times, areas, running = [points[0][0] if points else 0.0], [0.0], 0
    for at, change in points:  # the integral of the number that is being answered
        areas.append(areas[-1] + running * (at - times[-1]))
        times.append(at)
        running += change

    def area(at: float) -> float:
        place = bisect_right(times, at) - 1
        if place + 1 >= len(times) or times[place + 1] == times[place]:
            return areas[place]
        share = (at - times[place]) / (times[place + 1] - times[place])
        return areas[place] + share * (areas[place + 1] - areas[place])

    return [
        (area(call.at + call.seconds) - area(call.at)) / call.seconds if call.seconds > 0 else 1.0 for call in calls
    ]


def pool_model(costs: MeasuredCosts, speed: SpeedLaw, *, cells: int, capacity: int, slots: int) -> PoolModel:
    return PoolModel(cells=cells, capacity=capacity, slots=slots, poll_s=0.1, **speed._asdict(), **asdict(costs))


def predicted_s(run: TracedRun, pool: PoolModel, scheduler: SchedulerConfig, staleness: int) -> list[float]:
    """Seconds of each step after the warm-up, as the benchmark measures them."""
    # The trace's seconds are the harness's own; what surrounds them is start-up, which the pool counts.
    started = [
        episode.model_copy(
            update={"active_s": episode.active_s + pool.start_s, "wall_s": episode.wall_s + pool.start_s}
        )
        for episode in run.episodes
    ]
    return Simulation(pool, steps_of(started, pool), scheduler, staleness).run().step_s[1:]


def compared(measured: float, predicted: float) -> dict[str, Any]:
    return {"measured_s": measured, "predicted_s": predicted, "error": predicted / measured - 1}
