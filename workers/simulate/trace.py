"""A run's own trace as work for the simulator.

A trace (`workers.records.traces`) holds how long episodes took, in active seconds, on cells that were more or less
full. The simulator wants work: the seconds on a full cell. ``steps_of`` undoes what the company of other episodes did,
by the same law of speed that the simulator applies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from workers.configuration import describe
from workers.errors import UsageError
from workers.records.traces import TracedEpisode
from workflows.simulation.workload import PoolModel, SimulatedEpisode, SimulatedGroup, Steps


def steps_of(episodes: Sequence[TracedEpisode], pool: PoolModel) -> Steps:
    """The trace as work for the simulator, in the order of the trace's steps and groups."""
    works = works_of(episodes, pool)
    groups: dict[tuple[int, int], list[tuple[TracedEpisode, float]]] = defaultdict(list)
    for episode, work in zip(episodes, works, strict=True):
        groups[episode.step, episode.group].append((episode, work))
    steps: Steps = []
    for step in sorted({number for number, _ in groups}):
        of_step = []
        for key in sorted(key for key in groups if key[0] == step):
            members = groups[key]
            made = tuple(SimulatedEpisode(work, tokens_of(episode) / work) for episode, work in members)
            of_step.append(SimulatedGroup(members[0][0].task, made))
        steps.append(of_step)
    return steps


def tokens_of(episode: TracedEpisode) -> int:
    """Tokens that its training computes: those of its micro-steps where known, else its length."""
    return episode.trained_tokens or episode.sampled_tokens + episode.prompt_tokens


def works_of(episodes: Sequence[TracedEpisode], pool: PoolModel) -> list[float]:
    """Seconds that each would have taken on a full cell. With a ``solo_speedup`` of 1 those are its active seconds,
    less the start-up that the pool counts apart. All cells are taken to have served: best, a trace of `colocate`."""
    actives = [max(1e-3, episode.active_s - pool.start_s) for episode in episodes]
    if pool.solo_speedup <= 1 or any(episode.start is None for episode in episodes):
        return actives
    spans = [
        (float(e.start or 0.0), float(e.start or 0.0) + max(e.wall_s - pool.start_s, active))
        for e, active in zip(episodes, actives, strict=True)
    ]
    points = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    # Work that an episode does which runs throughout, up to each point in time.
    times, done, running = [points[0][0]], [0.0], 0
    for at, change in points:
        speed = pool.speed(running / (pool.cells * pool.capacity)) if running else 0.0
        done.append(done[-1] + speed * (at - times[-1]))
        times.append(at)
        running += change
    work_at = dict(zip(times, done, strict=True))
    works = []
    for active, (start, end) in zip(actives, spans, strict=True):
        share = active / max(1e-9, end - start)
        works.append(max(1e-3, (work_at[end] - work_at[start]) * share))
    return works


def pool_for(episodes: Sequence[TracedEpisode], changes: dict[str, Any]) -> PoolModel:
    """The pool that is asked for. Raises UsageError when a figure that only its owner knows is missing."""
    needed = {"cells": "--cells", "capacity": "--capacity", "train_tokens_per_s": "--training"}
    missing = [option for name, option in needed.items() if name not in changes]
    if missing:
        raise UsageError(f"a trace doesn't tell the pool: give {', '.join(missing)}")
    tokens = sum(tokens_of(episode) for episode in episodes)
    return pool_of({"micro_step_tokens": max(1, tokens // len(episodes)), **changes})


def pool_of(given: dict[str, Any]) -> PoolModel:
    """Raises UsageError for figures that no pool can have."""
    try:
        return PoolModel.model_validate(given)
    except ValidationError as error:
        raise UsageError(f"the pool: {describe(error)}") from None
