"""Refusals in OpenAI's words, for both of its dialects."""

from __future__ import annotations

from typing import Any

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
