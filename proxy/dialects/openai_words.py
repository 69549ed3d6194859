"""What both of OpenAI's dialects read and refuse alike, in its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from proxy.dialects import bodies
from proxy.dialects.dialect import Field
from proxy.errors import BadRequest, CallsExceeded, ContextExceeded, GatewayError, KeyRefused, UnknownPath


def error_object(fault: GatewayError) -> dict[str, Any]:
    """The object under ``error`` in the body of a refusal."""
    kind = "invalid_request_error" if fault.status < 500 else "server_error"
    message, param = str(fault), fault.param if isinstance(fault, BadRequest) else None
    if isinstance(fault, ContextExceeded):
        message = (
            f"This model's maximum context length is {fault.limit} tokens. However, your messages resulted in "
            f"{fault.prompt} tokens. Please reduce the length of the messages."
        )
        param = "messages"
    elif isinstance(fault, KeyRefused):
        message = f"Incorrect API key provided: {fault}."
    elif isinstance(fault, CallsExceeded):
        message = f"You exceeded your current quota of requests: {fault}."
    elif isinstance(fault, UnknownPath):
        message = f"Invalid URL ({fault})"
    return {"message": message, "type": kind, "param": param, "code": fault.code}


def refused(name: str, why: str) -> str:
    return f"Unsupported parameter: '{name}': {why}"


def check_fields(data: Mapping[str, Any], fields: Mapping[str, Field], unknown: Callable[[str], str]) -> dict[str, Any]:
    """As in ``bodies``; a call is never forced either."""
    asked = bodies.check_fields(data, fields, unknown, refused)
    if asked.get("tool_choice") not in (None, "auto", "none"):
        raise BadRequest("Unsupported value: 'tool_choice' must be auto: a call is never forced", param="tool_choice")
    return asked


def texts(content: Any, where: str, fields: Mapping[str, str], param: str, *, plain: bool = False) -> list[str]:
    """The texts of a string, of nothing, or of a list of parts. ``fields``: by a part's type, where its text is.
    ``plain``: a part may be a string."""
    if isinstance(content, str):
        return [content]
    read = []
    for part in bodies.array(content, f"'{where}' must be a string or an array of parts", param):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part if plain else None
        if isinstance(part, dict):
            text = part.get(fields.get(str(kind)))
        if not isinstance(text, str):
            words = f"'{where}': parts of type {kind} are not supported: the policy reads text only"
            raise BadRequest(words, param=param)
        read.append(text)
    return read
