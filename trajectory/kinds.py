"""What each leaf of an episode is: a context window's main path, a summary, a dead end, a side call.

Invariant: every call is a leaf or is continued in full by a later call of its context window, so each sampled
token of the episode lies on the path of at least one leaf; and a window has at most one ``main`` (``sub_agent``).

This works on records alone. It does not know token ids, rewards or what will be selected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

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

CallRole = Literal["line", "summary", "side"]
"""A call of its window's line, or one that branches off it."""


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
    roles = _roles(records)
    windows = _windows(records, continues, roles)
    for seq in _unannounced_side_calls(records, windows, roles):
        roles[seq] = "side"
    continued = [False] * len(records)
    for seq in range(len(records) - 1, -1, -1):
        target = continues[seq]
        if target < 0 or windows[target] != windows[seq]:
            continue
        if roles[seq] in ("line", roles[target]) or continued[seq]:
            continued[target] = True

    last_of_line: dict[int, int] = {}
    for seq, window in enumerate(windows):
        if not continued[seq] and roles[seq] == "line":
            last_of_line[window] = seq
    return [
        Leaf(record.seq, _kind(record, role, last_of_line.get(window)), record.agent, window)
        for record, role, window in zip(records, roles, windows, strict=True)
        if not continued[record.seq]
    ]


def _roles(records: Sequence[CallRecord]) -> list[CallRole]:
    """A call is a summary if a later window opens with it, whether it was announced or not; and one that was announced
    stays one though nothing came of it."""
    confirmed = {record.compacts for record in records}
    return ["side" if r.side else "summary" if r.summary or r.seq in confirmed else "line" for r in records]


def _kind(record: CallRecord, role: CallRole, last: int | None) -> Kind:
    if role == "side":
        return Kind.SIDE
    main = record.agent == ROOT_AGENT
    if role == "summary":
        return Kind.MAIN_SUMMARY if main else Kind.SUB_AGENT_SUMMARY
    if record.seq != last:
        return Kind.DEAD
    return Kind.MAIN if main else Kind.SUB_AGENT


def _unannounced_side_calls(
    records: Sequence[CallRecord], windows: Sequence[int], roles: Sequence[CallRole]
) -> list[int]:
    """Side calls that nobody recognised when they were made, such as a title before everything else: the root agent
    offers no tools in a window of this one call, though it does in others."""
    main = [record for record in records if record.agent == ROOT_AGENT and roles[record.seq] != "side"]
    if not any(record.tools for record in main):
        return []
    calls = Counter(windows)
    line = [record for record in main if roles[record.seq] == "line"]
    return [r.seq for r in line if not r.tools and r.compacts < 0 and calls[windows[r.seq]] == 1]


def _continued_calls(records: Sequence[CallRecord]) -> list[int]:
    """For each call, the ``seq`` of the last call whose whole sequence it keeps, -1 for none."""
    lengths: list[int] = []
    continues: list[int] = []
    for record in records:
        lengths.append(record.kept + (len(record.prompt_bytes) + len(record.output_bytes)) // 4)
        call, kept = record.parent, record.kept
        while call >= 0 and kept < lengths[call]:
            kept = min(kept, records[call].kept)
            call = records[call].parent
        continues.append(call)
    return continues


def _windows(records: Sequence[CallRecord], continues: Sequence[int], roles: Sequence[CallRole]) -> list[int]:
    """For each call, its context window.

    What a record says of itself is certain: with ``compacts`` or the forks ``agent``, ``compaction`` and ``opening`` a
    window opens (after a changed opening the earlier turns are context, so they are trained in the window before it),
    and calls that name the same summary share one: the first turn of that window was dropped. A call that says
    nothing, or that nothing explains, is judged by the tokens that it keeps.

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
    opened: dict[int, int] = {}
    continued = set(continues)
    for record in records:
        inherits = record.parent >= 0 and record.kept > 0 and records[record.parent].agent == record.agent
        if roles[record.seq] == "summary" and record.agent in line_end:
            summarised[record.agent] = line_end[record.agent]
        if roles[record.seq] == "line":
            end = summarised.pop(record.agent, -1)
            line_end[record.agent] = record.seq
            kept_call = continues[record.seq]
            if record.fork in ("agent", "compaction", "opening"):
                inherits = False
            elif inherits and kept_call < 0:
                window = windows[record.parent]
                inherits = not (grown[window] and record.kept < first_prompt[window])
            if record.fork in ("", "unexplained"):
                inherits = inherits and kept_call >= end
        if record.compacts in opened:
            window = opened[record.compacts]
        elif inherits and record.compacts < 0:
            window = windows[record.parent]
        else:
            window = len(grown)
            first_prompt.append(record.kept + len(record.prompt_bytes) // 4)
            grown.append(False)
        if record.compacts >= 0:
            opened[record.compacts] = window
        grown[window] |= record.seq in continued
        windows.append(window)
    return windows
