"""Episode traces: one JSON object per line and episode, as `gyre episodes RUN --export FILE` writes them.

A trace holds how long episodes took, in active seconds, on cells that were more or less full. `workers.simulate.trace`
makes work for the simulator of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.state.blobs import BlobStore
from infra.state.record_names import steps_name
from workers.errors import UsageError
from workers.records.episodes import records_of
from workflows.contracts.results import StepResult


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
