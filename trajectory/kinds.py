"""What each leaf of an episode is: a context window's main path, a summary, a dead end, a side call.

Invariant: every call is a leaf or is continued in full by a later call of its context window, so each sampled
token of the episode lies on the path of at least one leaf; and a window has at most one ``main`` (``sub_agent``).

This works on records alone. It does not know token ids, rewards or what will be selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from trajectory.records import CallRecord

ROOT_AGENT: Final = "root"


class Kind(StrEnum):
    """In order of precedence. Only the first four are ever trained."""

    MAIN = "main"
    MAIN_SUMMARY = "main_summary"
    SUB_AGENT = "sub_agent"
    SUB_AGENT_SUMMARY = "sub_agent_summary"
    DEAD = "dead"
    SIDE = "side"


TRAINABLE: Final = (Kind.MAIN, Kind.MAIN_SUMMARY, Kind.SUB_AGENT, Kind.SUB_AGENT_SUMMARY)


@dataclass(frozen=True)
class Leaf:
    """A call that ends a path."""

    seq: int
    kind: Kind
    agent: str
    window: int
    """Context window, numbered over the episode in the order in which windows open."""


def classify(records: Sequence[CallRecord]) -> list[Leaf]:
    """The leaves of one episode's records (in ``seq`` order from 0), in ``seq`` order.

    A call *continues* the last call whose whole sequence it keeps; a call of which only a part is kept (a turn that
    the harness dropped) isn't continued. Summaries and side calls branch off their window: they don't continue
    its line of calls unless the line goes on from them, so a window that ends in a compaction has its main path
    beside the summary's.
    """
    continues = _continued_calls(records)
    windows = _windows(records, continues)
    continued = [False] * len(records)
    for record in reversed(records):
        target = continues[record.seq]
        if target < 0 or windows[target] != windows[record.seq]:
            continue
        same_class = _branch(record) == _branch(records[target])
        if not _branch(record) or same_class or continued[record.seq]:
            continued[target] = True

    last_of_line: dict[int, int] = {}
    for record in records:
        if not continued[record.seq] and not _branch(record):
            last_of_line[windows[record.seq]] = record.seq
    return [
        Leaf(record.seq, _kind(record, last_of_line.get(window)), record.agent, window)
        for record, window in zip(records, windows, strict=True)
        if not continued[record.seq]
    ]


def _branch(record: CallRecord) -> str:
    """How the call leaves its window's line of calls; empty for a call of the line."""
    return "side" if record.side else "summary" if record.summary else ""


def _kind(record: CallRecord, last: int | None) -> Kind:
    if record.side:
        return Kind.SIDE
    main = record.agent == ROOT_AGENT
    if record.summary:
        return Kind.MAIN_SUMMARY if main else Kind.SUB_AGENT_SUMMARY
    if record.seq != last:
        return Kind.DEAD
    return Kind.MAIN if main else Kind.SUB_AGENT


def _continued_calls(records: Sequence[CallRecord]) -> list[int]:
    """For each call, the ``seq`` of the last call whose whole sequence it keeps, -1 for none."""
    lengths: list[int] = []
    found: list[int] = []
    for record in records:
        lengths.append(record.kept + (len(record.prompt_bytes) + len(record.output_bytes)) // 4)
        call, kept = record.parent, record.kept
        while call >= 0 and kept < lengths[call]:
            kept = min(kept, records[call].kept)
            call = records[call].parent
        found.append(call)
    return found


def _windows(records: Sequence[CallRecord], continues: Sequence[int]) -> list[int]:
    """For each call, its context window.

    A window opens with a call that keeps nothing or that comes from another agent's call. Harnesses keep the system
    prompt, and some the first turns, across a compaction, so two more calls of the line open one: the next after a
    summary, if it goes back behind the end of the summarised line; and one that keeps neither a turn nor the whole
    first prompt of a window in which some turn was continued. (Before any was, it replaces a first turn that the
    harness dropped; with the whole first prompt kept, it is a restart.)
    """
    windows: list[int] = []
    first_prompt: list[int] = []
    grown: list[bool] = []
    line_end: dict[str, int] = {}
    summarised: dict[str, int] = {}
    continued = set(continues)
    for record in records:
        inherits = record.parent >= 0 and record.kept > 0 and records[record.parent].agent == record.agent
        if record.summary and not record.side and record.agent in line_end:
            summarised[record.agent] = line_end[record.agent]
        if not _branch(record):
            end = summarised.pop(record.agent, -1)
            line_end[record.agent] = record.seq
            kept_call = continues[record.seq]
            if inherits and kept_call < 0:
                window = windows[record.parent]
                inherits = not (grown[window] and record.kept < first_prompt[window])
            inherits = inherits and kept_call >= end
        if inherits:
            window = windows[record.parent]
        else:
            window = len(grown)
            first_prompt.append(record.kept + len(record.prompt_bytes) // 4)
            grown.append(False)
        grown[window] |= record.seq in continued
        windows.append(window)
    return windows
