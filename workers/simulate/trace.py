"""Episode traces: one JSON object per line and episode, as `gyre episodes RUN --export FILE` writes them.

A trace holds how long episodes took, in active seconds, on cells that were more or less full. The simulator wants work:
the seconds on a full cell. ``steps_of`` undoes what the company of other episodes did, by the same law of speed that
the simulator applies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.state.blobs import BlobStore
from infra.state.record_names import steps_name
from workers.configuration import describe
from workers.errors import UsageError
from workers.records.episodes import records_of
from workflows.contracts.results import StepResult
from workflows.simulation.workload import PoolModel, SimulatedEpisode, SimulatedGroup, Steps


class TracedEpisode(BaseModel):
    """One line. Keys that a newer gyre adds are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run: str
    step: int
    group: int
    index: int = 0
    task: str
    train: bool = True
    version: int = 0
    start: float | None = None
    """Unix seconds at which its first call came; None when it made none."""
    active_s: float
    held_s: float = 0.0
    wall_s: float = 0.0
    calls: int = 0
    sampling_s: float = 0.0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    """Of its calls' own prompts, what earlier calls had already not counted: with the sampled ones, its length."""
    trained_tokens: int = 0
    """0: not known."""
    moved_calls: int = 0
    outcome: str = ""
    reward: float | None = None


def export_trace(blobs: BlobStore, run: str, seals: list[dict[str, Any]], file: Path) -> int:
    """Write a line for each of a run's ``seals``; returns how many. Side calls aren't trained and so don't count."""
    results = [StepResult.model_validate_json(blobs.get_named(name)) for name in blobs.names(steps_name(run))]
    training = {result.step: result.train for result in results}
    lines = []
    for seal in seals:
        _, step, group, index = seal["episode"].split("/")[:4]
        records = records_of(blobs, seal)
        counted = [record for record in records if not record.side]
        episode = TracedEpisode(
            **{name: seal["exit"][name] for name in ("active_s", "held_s", "wall_s")},
            **{name: seal[name] for name in ("task", "version", "calls", "outcome", "reward")},
            run=run,
            step=step,
            group=group,
            index=index,
            train=training.get(int(step), True),
            start=min((record.started_at for record in records), default=None),
            sampling_s=sum(record.active_s for record in records),
            sampled_tokens=sum(len(record.output_ids) for record in counted),
            prompt_tokens=sum(len(record.prompt_ids) for record in counted),
            moved_calls=sum(len(record.cells) > 1 for record in records),
        )
        lines.append(episode.model_dump_json() + "\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def read_trace(path: Path) -> list[TracedEpisode]:
    """Raises UsageError with the line that is no episode."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error.strerror}") from None
    traced = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                traced.append(TracedEpisode.model_validate_json(line))
            except ValidationError as error:
                fault = error.errors()[0]
                where = ".".join(map(str, fault["loc"])) or "the line"
                raise UsageError(f"{path}, line {number}: {where}: {fault['msg']}") from None
    episodes = [episode for episode in traced if episode.train and episode.active_s > 0]
    if not episodes:
        raise UsageError(f"{path} has no training episode that ran")
    return episodes


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
