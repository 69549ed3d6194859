"""Reading a sampled turn: from the bytes of its ids and the places of its marks to text, reasoning, calls and cuts.

Invariant: a call is the mark ``<tool_call>``, a JSON object and the mark ``</tool_call>``, white space aside; marks
inside the object's strings don't end it. Positions are bytes until the very end, where a cut must be one between two
ids. Whether a mark is a token or spelled as text is the family's affair: it gives the places.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from infra.chat.chatml import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN
from infra.chat.turns import ParsedCall, ParsedTurn, call_from_json

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
        places = {mark: [found.start() for found in re.finditer(mark, view)] for mark in _MARKS}
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
        call = call_from_json(data[body:closing].decode(errors="replace")) if closing in closings else None
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
