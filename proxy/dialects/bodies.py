"""What every dialect does alike: JSON bodies in and out, server-sent events, the closed table of fields, minted ids.

Invariant: what ``load`` returns can be written again as JSON and hashed: no lone surrogates, no number that JSON
libraries disagree on. It knows no dialect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from proxy.conversation.requests import ModelRequest
from proxy.dialects.dialect import Field
from proxy.errors import BadRequest

SIDE_MODEL = "gyre-side"
"""The model name under which a harness is told to make its side calls (titles and the like)."""

_MINTED = re.compile(r"(?:[a-z]+_)?gyre_([A-Za-z0-9_-]{24})(?:\.[0-9]+)?")
_arguments = json.JSONEncoder(ensure_ascii=False).encode


def load(body: bytes) -> dict[str, Any]:
    """The body as an object. Lone surrogates become U+FFFD. Raises BadRequest."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            data = _tolerant(body)
        except (ValueError, RecursionError) as fault:
            raise BadRequest("could not parse the JSON body of your request") from fault
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object")
    return data


def _tolerant(text: bytes | str) -> Any:
    """JSON with lone surrogates: undecodable tool output is written so, and orjson refuses it. Raises ValueError."""
    return orjson.loads(json.dumps(_scrub(json.loads(text)), ensure_ascii=False, allow_nan=False))


def _scrub(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_scrub(item) for item in value]
    if isinstance(value, dict):
        return {_scrub(name): _scrub(item) for name, item in value.items()}
    return value


def dump(value: Any) -> bytes:
    return orjson.dumps(value)


def arguments(value: Any, where: str) -> str:
    """JSON text of a tool call's arguments, spaced as the renderer writes what a policy sampled. Raises BadRequest."""
    try:
        return _arguments(value)
    except RecursionError as fault:
        raise BadRequest(f"{where}: nested too deeply", param=where) from fault


def argument_value(json_text: str) -> Any:
    """The value of a call's arguments; what is no JSON stays text."""
    try:
        return orjson.loads(json_text)
    except orjson.JSONDecodeError:
        pass
    try:
        return _tolerant(json_text)
    except (ValueError, RecursionError):
        return json_text


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """A server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


def data_event(data: Mapping[str, Any]) -> bytes:
    """A server-sent event without a name."""
    return b"data: %b\n\n" % orjson.dumps(data)


def reference(turn_id: str, kind: str = "", index: int | None = None) -> str:
    """An id that carries a turn's: ``KIND_gyre_TURN.INDEX``; what is not given is left out."""
    return f"{kind}_gyre_{turn_id}"[not kind :] + ("" if index is None else f".{index}")


def turn_of(value: Any) -> str:
    """The turn id in an id that ``reference`` made; "" for anything else."""
    match = _MINTED.fullmatch(value) if isinstance(value, str) else None
    return match[1] if match else ""


def check_fields(
    data: Mapping[str, Any],
    fields: Mapping[str, Field],
    unknown: Callable[[str], str],
    refused: Callable[[str, str], str],
) -> dict[str, Any]:
    """Hold a body against its dialect's table; returns the ignored fields that were given, to be recorded.

    ``unknown`` and ``refused`` are the provider's words. Raises BadRequest.
    """
    asked = {}
    for name, value in data.items():
        field = fields.get(name)
        if field is None:
            raise BadRequest(unknown(name), param=name)
        if value is None:
            continue
        if field.treatment == "ignored":
            asked[name] = value
        elif field.treatment == "refused" and not any(_same(value, taken) for taken in field.taken):
            raise BadRequest(refused(name, field.note), param=name)
    return asked


def _same(value: Any, taken: Any) -> bool:
    return value == taken and isinstance(value, bool) == isinstance(taken, bool)


def writable(value: Any, where: str) -> None:
    """Raises BadRequest for what is nested more deeply than can be hashed and recorded."""
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as fault:
        raise BadRequest(f"{where}: nested too deeply", param=where) from fault


def array(value: Any, words: str, param: str) -> list[Any]:
    """A list, empty where there is none. Raises BadRequest with the provider's words."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(words, param=param)
    return value


def flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name}: must be true or false", param=name)
    return bool(value)


def positive(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadRequest(f"{name}: must be an integer greater than or equal to 1", param=name)
    return value


def text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{name}: must be a string", param=name)
    return value or ""


def header(headers: Mapping[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1")


def side(request_model: str) -> bool | None:
    """The hint of a model name."""
    return True if request_model == SIDE_MODEL else None


def model_of(request: ModelRequest) -> str:
    return request.model or "gyre-policy"
