"""What a sampled turn says: text, reasoning and tool calls, and where each call ends in tokens.

Invariant: every sampled id is in the reasoning, the content or a call (or separates them); a cut is a number of
leading ids that reads as the same reasoning, content and first calls. It knows neither tokenizers nor families.
"""

from __future__ import annotations

import json
from dataclasses import dataclass


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


def call_from_json(text: str) -> ParsedCall | None:
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
