"""Reading a sampled turn: from the bytes of its ids and the places of its marks to text, reasoning, calls and cuts.

Invariants: every sampled id is in the reasoning, the content or a call (or separates them); a cut is a number of
leading ids that reads as the same reasoning, content and first calls. A call is the mark ``<tool_call>``, a JSON object
and the mark ``</tool_call>``, white space aside; marks inside the object's strings don't end it. Positions are bytes
until the very end, where a cut must be one between two ids. Whether a mark is a token or spelled as text is the
family's affair: it gives the places.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from infra.chat.chatml import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN


@dataclass(frozen=True)
class ParsedCall:
    """A tool call as sampled: ``arguments`` is JSON text, re-serialised from what was sampled."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedTurn:
    """``content`` and ``reasoning`` have no line breaks at their ends. Both are for people and harnesses: tokens come
    from the sampled ids, never from here."""

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]
    malformed: int
    """Tool-call spans that are no valid call; they stay in the text."""
    cuts: tuple[int | None, ...]
    """``cuts[k]``, k = 0 … len(calls): number of leading ids that hold reasoning, content and the first k calls, and
    nothing else. None where no such cut exists: text stands after the k-th call, or a token spans the place. The last
    one is the whole turn without its end-of-turn id."""


Places = Mapping[str, Sequence[int]]
"""Mark -> where it begins in the turn's bytes, in order."""

_WHITE = " \t\r\n"
_object = json.JSONDecoder()


def read_turn(pieces: Sequence[bytes], places: Places | None = None, *, thinking: bool = False) -> ParsedTurn:
    """Read a turn, in time linear in its length unless it is made to be slow.

    ``pieces``: the bytes of each id, without the end of the turn. ``places``: None where marks are plain text.
    ``thinking``: the generation prompt has opened the reasoning already.
    """
    data = b"".join(pieces)
    # One character per byte: JSON's structure is ASCII, so its places are the same in any reading of the rest.
    view = data.decode("latin-1")
    if places is None:
        places = {mark: [match.start() for match in re.finditer(mark, view)] for mark in _MARKS}
    reasoning, start = _reasoning(data, places, thinking)
    closings = frozenset(places[CALL_CLOSE])
    calls: list[ParsedCall] = []
    spans: list[tuple[int, int]] = []
    malformed, end = 0, start
    for opening in places[CALL_OPEN]:
        if opening < end:
            continue
        body = opening + len(CALL_OPEN)
        closing = _after_object(view, body)
        call = _call(data[body:closing].decode(errors="replace")) if closing in closings else None
        if call is None:
            malformed += 1
            continue
        end = closing + len(CALL_CLOSE)
        calls.append(call)
        spans.append((opening, end))
    borders = [start, *(place for span in spans for place in span), len(data)]
    texts = list(zip(borders[::2], borders[1::2], strict=True))
    content = b"".join(data[begin:end] for begin, end in texts).decode(errors="replace").strip("\n")
    last = next((begin + len(kept) for begin, end in reversed(texts) if (kept := data[begin:end].rstrip(b"\n"))), start)
    ends = list(accumulate(map(len, pieces)))
    cuts: list[int | None] = []
    # Text after a call would be missing from a turn that is cut behind the call.
    for place, (opening, _) in zip([last, *(end for _, end in spans)], [*spans[:1], *spans], strict=False):
        cuts.append(_boundary(data, ends, place) if last <= opening else None)
    return ParsedTurn(content, reasoning, tuple(calls), malformed, (*cuts[: len(calls)], len(pieces)))


_MARKS = (CALL_OPEN, CALL_CLOSE, THINK_OPEN, THINK_CLOSE)


def _reasoning(data: bytes, places: Places, thinking: bool) -> tuple[str, int]:
    """The reasoning and where it ends, its mark included. One that isn't closed takes up the turn."""
    opened = places[THINK_OPEN][:1] == [0]
    if not thinking and not opened:
        return "", 0
    begin = len(THINK_OPEN) if opened else 0
    end = next((place for place in places[THINK_CLOSE] if place >= begin), len(data))
    return data[begin:end].decode(errors="replace").strip("\n"), min(end + len(THINK_CLOSE), len(data))


def _after_object(view: str, begin: int) -> int:
    """Where the text goes on after the JSON object that starts at ``begin``; -1 when none does."""
    begin = _past_white(view, begin)
    if view[begin : begin + 1] != "{":
        return -1
    try:
        return _past_white(view, _object.raw_decode(view, begin)[1])
    except (ValueError, RecursionError):
        return -1


def _past_white(view: str, place: int) -> int:
    while view[place : place + 1] in _WHITE and place < len(view):
        place += 1
    return place


def _boundary(data: bytes, ends: Sequence[int], place: int) -> int | None:
    """Number of leading ids that reach ``place`` and hold nothing more than line breaks beyond it."""
    if place == 0:
        return 0
    count = bisect_left(ends, place)
    return count + 1 if not data[place : ends[count]].strip(b"\n") else None


def _call(text: str) -> ParsedCall | None:
    """The call that the text of a span spells, or None when it spells none."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", {})
        if not isinstance(name, str) or not name.isprintable() or not isinstance(arguments, dict):
            return None
        # A number may have become infinite; lone surrogates can be sent as their escapes only.
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return ParsedCall(name, written if _encodable(written) else json.dumps(arguments))
    except (ValueError, RecursionError):  # a policy may sample any nesting
        return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
