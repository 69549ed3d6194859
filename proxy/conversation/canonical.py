"""Whether an assistant turn that a harness sends back still says what was sampled, whatever was done to its form.

Harnesses parse a turn's tool arguments and write them anew: whitespace, the order of keys, escapes, "5000" for 5000,
defaults of the schema, blanks at the ends of lines and a leading ``cd DIR &&`` come and go. None of that is a change
here. Reasoning may be left out; blanks around a text don't count.

Invariant: no function raises, on any text, and every one takes time linear in its texts. It knows messages only: not
where a turn stands, and not its tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import orjson

from infra.chat.messages import Message, Tool, ToolCall

UNPARSED: Final = "__unparsedToolInput"
"""Under this key Claude Code sends back arguments that it could not parse: ``raw``, the text, and ``len``."""
DEEPEST: Final = 64
"""Arguments nested deeper than this are compared as text."""
EXACT: Final = 2**53
"""From here on JavaScript's numbers are no exact integers."""

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_LEADING_CD = re.compile(r"""\s*(?:cd\s+(?:"[^"]*"|'[^']*'|\\.|[^\s&;|"'\\])+\s*&&\s*)+""")
_NOTHING: Final = frozenset(["null", "false", '""', "[]", "{}"])
_BLANKS: Final = " \t\r\f\v"


class _TooDeep(Exception):
    """The value is nested deeper than ``DEEPEST``."""


def said_key(message: Message) -> tuple[str, ...]:
    """What an assistant turn says, equal for all forms of it: the text, then name and arguments of each call.

    Reasoning and ids are left out. Arguments that are null, false or empty are left out too, since a schema's
    defaults are not known here: equal keys don't prove equal turns.
    """
    parts = [message.content.strip()]
    for call in message.tool_calls:
        parts += [call.name, _canonical_arguments(call.arguments)]
    return tuple(parts)


def same_call(said: ToolCall, sent: ToolCall, schema: Mapping[str, Any]) -> bool:
    """Whether both call the same tool with the same arguments. ``schema``: of the arguments, for its defaults."""
    if said.name != sent.name:
        return False
    if said.arguments == sent.arguments:
        return True
    parsed, value = _parsed(sent.arguments)
    raw, length = _unparsed(value)
    if raw is not None:
        cut = len(raw) < len(said.arguments) == length and said.arguments.startswith(raw)
        return cut or raw.strip() == said.arguments.strip()
    was_parsed, was = _parsed(said.arguments)
    if parsed and was_parsed:
        try:
            return _same(was, value, schema, 0)
        except (_TooDeep, RecursionError):
            pass
    return said.arguments.strip() == sent.arguments.strip()


def rewritten(said: Message, sent: Message, tools: Sequence[Tool]) -> bool:
    """Whether the harness changed what the turn says. Leaving out its reasoning is no change."""
    if _changed(said.reasoning, sent.reasoning) and sent.reasoning.strip():
        return True
    if _changed(said.content, sent.content) or len(said.tool_calls) != len(sent.tool_calls):
        return True
    if said.tool_calls == sent.tool_calls:
        return False
    schemas = {tool.name: tool.parameters for tool in tools}
    pairs = zip(said.tool_calls, sent.tool_calls, strict=True)
    return not all(one == other or same_call(one, other, schemas.get(one.name, {})) for one, other in pairs)


def kept_calls(said: Message, sent: Message) -> int | None:
    """How many of ``said``'s leading tool calls, by id, are left in ``sent``; None if that is no proper part of it.

    The blocks of a turn are its reasoning, its text and its calls, in this order; a harness that was killed sends back
    the turn without the last calls, which nothing had answered. Reasoning may be left out besides.
    """
    left = len(sent.tool_calls)
    if left >= len(said.tool_calls) or _changed(said.content, sent.content):
        return None
    if _changed(said.reasoning, sent.reasoning) and sent.reasoning.strip():
        return None
    for one, other in zip(said.tool_calls, sent.tool_calls, strict=False):
        if (one.id, one.name) != (other.id, other.name):
            return None
    return left


def _changed(said: str, sent: str) -> bool:
    return said != sent and said.strip() != sent.strip()


def _canonical_arguments(text: str) -> str:
    parsed, value = _parsed(text)
    raw, _ = _unparsed(value)
    if raw is not None:
        text = raw
        parsed, value = _parsed(raw)
    if parsed:
        try:
            return _flat(value, 0)
        except (_TooDeep, RecursionError):
            pass
    return text.strip()


def _parsed(text: str) -> tuple[bool, Any]:
    """Whether a text is JSON, and its value. No arguments at all are an empty object."""
    if not text or text.isspace():
        return True, {}
    try:
        return True, orjson.loads(text)
    except ValueError:
        pass
    try:
        # Half a surrogate pair is no UTF-8, but JavaScript takes it.
        return True, json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return False, None


def _no_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _unparsed(value: Any) -> tuple[str | None, int]:
    if isinstance(value, dict) and len(value) == 1:
        inner = value.get(UNPARSED)
        if isinstance(inner, dict) and isinstance(inner.get("raw"), str):
            length = inner.get("len")
            return inner["raw"], length if isinstance(length, int) else -1
    return None, -1


def _same(said: Any, sent: Any, schema: Any, depth: int) -> bool:
    if depth > DEEPEST:
        raise _TooDeep
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(said, dict) and isinstance(sent, dict):
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        for key in said.keys() | sent.keys():
            of_key = properties.get(key)
            if key in said and key in sent:
                if not _same(said[key], sent[key], of_key, depth + 1):
                    return False
            elif not _default(said[key] if key in said else sent[key], of_key, depth + 1):
                return False
        return True
    if isinstance(said, list) and isinstance(sent, list):
        items = schema.get("items")
        return len(said) == len(sent) and all(
            _same(one, other, items, depth + 1) for one, other in zip(said, sent, strict=True)
        )
    if isinstance(said, dict | list) or isinstance(sent, dict | list):
        return False
    return said == sent or _scalar(said) == _scalar(sent)


def _default(value: Any, schema: Any, depth: int) -> bool:
    """Whether a value says no more than leaving it out."""
    if value is None:
        return True
    return isinstance(schema, Mapping) and "default" in schema and _same(value, schema["default"], schema, depth)


def _flat(value: Any, depth: int) -> str:
    if depth > DEEPEST:
        raise _TooDeep
    if isinstance(value, dict):
        parts = ((json.dumps(key), _flat(value[key], depth + 1)) for key in sorted(value))
        return "{" + ",".join(f"{key}:{part}" for key, part in parts if part not in _NOTHING) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_flat(part, depth + 1) for part in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """One text for all forms of a value: numbers and booleans may stand in quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return _number(value)
    text = str(value)
    short = text.strip() if len(text) <= 40 else ""
    if short in ("true", "false"):
        return short
    if short and _NUMBER.fullmatch(short):
        return _number(float(short) if not short.lstrip("-").isdigit() else int(short))
    if led := _LEADING_CD.match(text):
        text = text[led.end() :]
    return json.dumps("\n".join(line.rstrip(_BLANKS) for line in text.split("\n")))


def _number(value: float) -> str:
    if isinstance(value, int) and abs(value) >= EXACT:
        try:
            value = float(value)
        except OverflowError:
            return "null"
    if not math.isfinite(value):
        return "null"
    return str(int(value)) if value == int(value) and abs(value) < EXACT else repr(value)
