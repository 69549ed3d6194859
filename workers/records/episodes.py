"""`gyre episodes` and `gyre show`: what became of every episode, from the seals in the blob store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson
from rich.markup import escape
from rich.tree import Tree

from activities.trajectories import unpack_records
from infra.chat.families import renderer_for
from infra.state.blobs import BlobMissing, BlobStore
from infra.state.record_names import seal_name
from trajectory.kinds import ROOT_AGENT, classify
from trajectory.records import CallRecord, decode_chain
from workers.errors import UsageError

CHANGES: Final = ("mutated", "synthetic", "partial", "resampled")
"""Counts of a record; see ``CallRecord``."""


def sealed_episodes(blobs: BlobStore, run: str, step: int | None, outcome: str = "") -> list[dict[str, Any]]:
    """The seals of a run's episodes, in order. Raises UsageError when the run has none."""
    prefix = f"episodes/{run}" + (f"/{step:06d}" if step is not None else "")
    seals = [orjson.loads(blobs.get_named(name)) for name in blobs.names(prefix)]
    if not seals:
        where = f"run {run!r}" + (f" step {step}" if step is not None else "")
        raise UsageError(f"{where} has no sealed episodes: `gyre status` lists the runs")
    return [seal for seal in seals if not outcome or seal["outcome"] == outcome]


def episode_line(seal: dict[str, Any]) -> str:
    reward = "excluded" if seal["reward"] is None else f"{seal['reward']:.2f}"
    ended = seal["exit"]
    return (
        f"{seal['episode']}  {seal['outcome']:<16} reward {reward:<8} {seal['calls']:>3} calls  "
        f"active {ended['active_s']:6.1f} s  held {ended['held_s']:5.1f} s  {seal['detail']}"
    )


def load_episode(blobs: BlobStore, episode: str) -> tuple[dict[str, Any], list[CallRecord]]:
    """Seal and call records. Raises UsageError for an episode that isn't sealed."""
    try:
        seal = orjson.loads(blobs.get_named(seal_name(episode)))
    except BlobMissing:
        raise UsageError(f"there is no sealed episode {episode!r}: `gyre episodes RUN` lists them") from None
    return seal, records_of(blobs, seal)


def records_of(blobs: BlobStore, seal: dict[str, Any]) -> list[CallRecord]:
    """The call records of a sealed episode; none for one that has made no call."""
    return decode_chain(unpack_records(blobs.get(seal["records_ref"]))) if seal["records_ref"] else []


def episode_json(seal: dict[str, Any], records: list[CallRecord]) -> dict[str, Any]:
    """Seal and calls for programs: token ids, log-probs and versions as lists."""
    kinds = {leaf.seq: str(leaf.kind) for leaf in classify(records)}
    calls = []
    for record in records:
        call = {field: getattr(record, field) for field in record.__struct_fields__ if not field.endswith("_bytes")}
        for column in ("prompt_ids", "output_ids", "logprobs", "versions"):
            call[column] = getattr(record, column).tolist()
        calls.append({**call, "kind": kinds.get(record.seq, "")})
    return {**seal, "counts": episode_counts(records), "records": calls}


def episode_counts(records: Sequence[CallRecord]) -> dict[str, int]:
    """What happened to an episode's calls on their way: forks by reason, and what harnesses and cells changed. Zeros
    are left out."""
    counts = Counter(f"fork.{record.fork}" for record in records if record.fork)
    for record in records:
        for what in CHANGES:
            counts[what] += int(getattr(record, what))
    return {what: count for what, count in counts.items() if count}


def episode_tree(seal: dict[str, Any], records: list[CallRecord], policy: Path) -> Tree:
    """The trajectory tree for people: a branch per call, its prompt and what was sampled, and how leaves count."""
    renderer = renderer_for(policy)
    kinds = {leaf.seq: leaf.kind for leaf in classify(records)}
    root = Tree(f"[bold]{seal['episode']}[/] · {seal['task']} · {seal['outcome']} · reward {seal['reward']}")
    if counts := episode_counts(records):
        root.add("[dim]" + ", ".join(f"{what} {count}" for what, count in counts.items()) + "[/]")
    branches: dict[int, Tree] = {-1: root}
    for record in records:
        kind = kinds.get(record.seq)
        versions = ",".join(map(str, sorted(set(record.versions.tolist()))))
        label = f"call {record.seq}" + (f" [green]{kind}[/]" if kind else "") + _lineage(record)
        label += f" · v{versions} · {'→'.join(record.cells)} · {record.finish_reason}"
        branch = branches[record.parent].add(label)
        prompt = renderer.decode(record.prompt_ids.tolist())
        sampled = renderer.decode(record.output_ids.tolist())
        branch.add(f"[dim]+{len(record.prompt_ids)} prompt tokens (keeps {record.kept})[/] {_short(prompt)}")
        branch.add(f"[cyan]{len(record.output_ids)} sampled[/] {_short(sampled)}")
        # A linear conversation reads as a list, not as a staircase: only a fork opens a new level.
        forks = sum(other.parent == record.seq for other in records) > 1
        branches[record.seq] = branch if forks else branches[record.parent]
    return root


def _lineage(record: CallRecord) -> str:
    """Whose a call is, where that isn't the main agent, why it forks, and what isn't as it was said."""
    parts = [] if record.agent == ROOT_AGENT else [escape(record.agent)]
    if record.fork:
        parts.append(
            f"[yellow]fork: {record.fork}[/]" + (f" of call {record.compacts}" if record.compacts >= 0 else "")
        )
    changes = {what: int(getattr(record, what)) for what in CHANGES}
    parts += [what if count == 1 else f"{count} {what}" for what, count in changes.items() if count]
    return "".join(f" · {part}" for part in parts)


def _short(text: str, limit: int = 300) -> str:
    flat = text.replace("\n", "⏎").replace("[", "\\[")
    return flat if len(flat) <= limit else f"{flat[: limit // 2]} … {flat[-limit // 2 :]}"
