"""The episode trace of a run: one JSON object per sealed episode, for `gyre simulate --trace`.

It reads seals and step results in the blob store, as `gyre episodes` does, and needs no stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from infra.state.blobs import BlobStore
from infra.state.record_names import steps_name
from trajectory.records import CallRecord
from workers.records.episodes import records_of
from workflows.contracts.results import StepResult


def export_trace(blobs: BlobStore, run: str, seals: list[dict[str, Any]], file: Path) -> int:
    """Write a line for each of ``seals``; returns how many."""
    training = {
        result.step: result.train
        for result in (StepResult.model_validate_json(blobs.get_named(name)) for name in blobs.names(steps_name(run)))
    }
    lines = [orjson.dumps(line) for line in traced(blobs, seals, training)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    return len(lines)


def traced(blobs: BlobStore, seals: list[dict[str, Any]], training: dict[int, bool]) -> Iterator[dict[str, Any]]:
    for seal in seals:
        run, step, group, index = seal["episode"].split("/")[:4]
        records = records_of(blobs, seal)
        ended = seal["exit"]
        yield {
            "run": run,
            "step": int(step),
            "group": int(group),
            "index": int(index),
            "task": seal["task"],
            "train": training.get(int(step), True),
            "version": seal["version"],
            "start": min((record.started_at for record in records), default=None),
            "active_s": ended["active_s"],
            "held_s": ended["held_s"],
            "wall_s": ended["wall_s"],
            "calls": seal["calls"],
            "sampling_s": sum(record.active_s for record in records),
            "sampled_tokens": _tokens(records, "output_bytes"),
            "prompt_tokens": _tokens(records, "prompt_bytes"),
            "trained_tokens": 0,
            "moved_calls": sum(len(record.cells) > 1 for record in records),
            "outcome": seal["outcome"],
            "reward": seal["reward"],
        }


def _tokens(records: list[CallRecord], column: str) -> int:
    """Side calls aren't trained and so don't count."""
    return sum(len(getattr(record, column)) // 4 for record in records if not record.side)
