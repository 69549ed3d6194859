"""What must hold of a finished check: of the records, of what the engine saw, and of what would be trained. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trajectory.kinds import classify
from trajectory.records import CallRecord, RecordError
from trajectory.selection import select
from trajectory.tree import EpisodeTree
from workers.harness_check.engine import SeenRequest

SHOWN = 3
"""Examples that a finding names."""


@dataclass(frozen=True)
class CheckResult:
    """One thing that was looked at."""

    what: str
    ok: bool
    detail: str = ""


def sequences(records: Sequence[CallRecord]) -> list[list[int]]:
    """int[length] of each call: tokens(parent)[:kept] + prompt_ids + output_ids."""
    full: list[list[int]] = []
    for record in records:
        kept = full[record.parent][: record.kept] if record.parent >= 0 else []
        full.append([*kept, *record.prompt_ids.tolist(), *record.output_ids.tolist()])
    return full


def kinds(records: Sequence[CallRecord]) -> dict[str, int]:
    """Leaves by kind."""
    return dict(Counter(str(leaf.kind) for leaf in classify(records)))


def counts(records: Sequence[CallRecord]) -> dict[str, int]:
    """How often a harness rewrote, invented or shortened what the policy had said; resampled: tokens."""
    return {
        "mutated": sum(record.mutated for record in records),
        "synthetic": sum(record.synthetic for record in records),
        "partial": sum(record.partial for record in records),
        "resampled": sum(record.resampled for record in records),
    }


def verify(
    records: Sequence[CallRecord], requests: Sequence[SeenRequest], expected: dict[str, set[int]], turns: int
) -> list[CheckResult]:
    """``expected``: of each kind the numbers of leaves that are right; other kinds must have none."""
    return [
        CheckResult("turns", len(records) >= turns, f"{len(records)} calls, {turns} expected"),
        _forks(records),
        _stream(records, requests),
        _trained_once(records),
        _own_samples(records),
        _kinds(records, expected),
    ]


def _forks(records: Sequence[CallRecord]) -> CheckResult:
    wrong = [record for record in records if record.fork == "unexplained"]
    where = ", ".join(f"call {r.seq} of {r.agent} (parent {r.parent}, kept {r.kept})" for r in wrong[:SHOWN])
    return CheckResult("no fork without a reason", not wrong, where or _tally(r.fork for r in records if r.fork))


def _stream(records: Sequence[CallRecord], requests: Sequence[SeenRequest]) -> CheckResult:
    """What the engine was given and gave is, token by token, what the records say."""
    what = "the records are the engine's stream"
    sampled = [request for request in requests if request.output_ids and not request.lost]
    seen = Counter(tuple(request.sequence) for request in sampled if not request.held)
    held = Counter(tuple(request.sequence) for request in sampled if request.held)
    recorded = Counter(tuple(sequence) for sequence in sequences(records))
    extra, lacking = recorded - seen - held, seen - recorded
    detail = f"{sum(recorded.values())} sequences, {max(map(len, recorded), default=0)} tokens at most"
    if extra or lacking:
        detail = f"{extra.total()} recorded but never sampled, {lacking.total()} sampled but not recorded"
    return CheckResult(what, not extra and not lacking, detail)


def _trained_once(records: Sequence[CallRecord]) -> CheckResult:
    what = "every sampled token is a target once at most"
    try:
        tree = EpisodeTree.from_records(records)
    except RecordError as error:
        return CheckResult(what, False, str(error))
    for cap in (None, 5):
        targets = Counter[tuple[int, int]]()
        for trajectory in select(tree, classify(records), cap).trajectories:
            columns = trajectory.path[trajectory.target]
            targets.update(zip(tree.call[columns].tolist(), tree.offset[columns].tolist(), strict=True))
        if (most := max(targets.values(), default=0)) > 1:
            return CheckResult(what, False, f"a token is a target {most} times")
        if cap is None:
            trained = len(targets)
    sampled = sum(len(record.output_bytes) // 4 for record in records)
    return CheckResult(what, True, f"{trained} of {sampled} sampled tokens")


def _own_samples(records: Sequence[CallRecord]) -> CheckResult:
    """The scripted policy never says the same twice, so equal outputs would be one sample in two records."""
    outputs = Counter(record.output_bytes for record in records)
    twice = sum(count - 1 for count in outputs.values())
    prompts = Counter(
        tuple(full[: len(full) - len(r.output_ids)]) for r, full in zip(records, sequences(records), strict=True)
    )
    equal = sum(count for count in prompts.values() if count > 1)
    return CheckResult(
        "every call has a sample of its own", not twice, f"{equal} calls with equal prompts, {twice} repeated"
    )


def _kinds(records: Sequence[CallRecord], expected: dict[str, set[int]]) -> CheckResult:
    leaves = kinds(records)
    names = {*leaves, *expected}
    wrong = [name for name in sorted(names) if leaves.get(name, 0) not in expected.get(name, {0})]
    shown = ", ".join(f"{count} {kind}" for kind, count in leaves.items())
    if wrong:
        shown += "; expected " + ", ".join(f"{sorted(expected.get(name, {0}))} {name}" for name in wrong)
    return CheckResult("kinds", not wrong, shown)


def _tally(words: Iterable[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(words).items())
