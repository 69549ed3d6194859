"""OpenAI Responses, the answering half: a ``Turn`` to a body or a stream, refusals in OpenAI's words.

A turn goes out as a reasoning item, a message and calls. Its id travels in the ids of all of them, and in
``encrypted_content`` where that is asked for: codex returns them verbatim. It knows neither the router nor the ledger.
"""

from __future__ import annotations

import itertools
from typing import Any

from infra.chat.messages import Message, ToolCall
from proxy.conversation.requests import ModelRequest, Turn
from proxy.dialects import bodies, openai_responses_request
from proxy.dialects.openai_responses_request import ENCRYPTED, FREEFORM
from proxy.dialects.openai_words import error_object
from proxy.errors import ContextExceeded, GatewayError, Unavailable

NAME: str = "openai_responses"
PATHS: tuple[str, ...] = ("/v1/responses", "/responses")
FIELDS = openai_responses_request.FIELDS
parse = openai_responses_request.parse
_PLACEHOLDER = {
    "id": "resp_gyre",
    "object": "response",
    "created_at": 0,
    "status": "in_progress",
    "model": "gyre-policy",
}
PING: bytes = bodies.event(
    "response.in_progress",
    # Whole enough for clients that check what they read.
    {
        "type": "response.in_progress",
        "sequence_number": 1,
        "response": {**_PLACEHOLDER, "output": [], "parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
    },
)
"""An event, since codex's idle timer is not reset by a comment."""


def response(request: ModelRequest, turn: Turn) -> bytes:
    """The body of an answer without streaming."""
    return bodies.dump(_finished(request, turn, _items(request, turn)))


def stream_start(request: ModelRequest, turn: Turn) -> bytes:
    """The first bytes of a stream."""
    head = _envelope(request, turn)
    kinds = ("response.created", "response.in_progress")
    return b"".join(_event(number, kind, response=head) for number, kind in enumerate(kinds))


def stream_turn(request: ModelRequest, turn: Turn) -> bytes:
    """The whole turn, one delta to a part, and the end of the stream."""
    numbers = itertools.count(2)
    items = _items(request, turn)
    events = []
    for index, item in enumerate(items):
        at = {"item_id": item["id"], "output_index": index}
        events.append(_event(next(numbers), "response.output_item.added", output_index=index, item=_begun(item)))
        events += [_event(next(numbers), kind, **at, **fields) for kind, fields in _deltas(item)]
        events.append(_event(next(numbers), "response.output_item.done", output_index=index, item=item))
    whole = _finished(request, turn, items)
    events.append(_event(next(numbers), f"response.{whole['status']}", response=whole))
    return b"".join(events)


def stream_error(fault: GatewayError) -> bytes:
    """A refusal after the stream has begun. codex asks again after a server_error, and gives up after the others."""
    code = "server_error" if isinstance(fault, Unavailable) else "invalid_prompt"
    if isinstance(fault, ContextExceeded):
        code = fault.code
    failed = {"code": code, "message": error_object(fault)["message"]}
    return _event(2, "response.failed", response={**_PLACEHOLDER, "status": "failed", "output": [], "error": failed})


def error(fault: GatewayError) -> bytes:
    """The body of a refusal."""
    return bodies.dump({"error": error_object(fault)})


def _items(request: ModelRequest, turn: Turn) -> list[dict[str, Any]]:
    sampled, turn_id = turn.message, turn.turn_id
    items: list[dict[str, Any]] = []
    if sampled.reasoning:
        item: dict[str, Any] = {"type": "reasoning", "id": bodies.reference(turn_id, "rs"), "summary": []}
        item["content"] = [{"type": "reasoning_text", "text": sampled.reasoning}]
        if ENCRYPTED in (request.asked.get("include") or ()):
            item["encrypted_content"] = bodies.reference(turn_id)
        items.append(item)
    if sampled.content:
        part = {"type": "output_text", "text": sampled.content, "annotations": []}
        state = "completed" if turn.finish_reason == "stop" else "incomplete"
        head = {"type": "message", "id": bodies.reference(turn_id, "msg"), "role": "assistant", "status": state}
        items.append(head | {"content": [part]})
    tools = {tool.name: tool.parameters for tool in request.tools}
    for index, call in enumerate(sampled.tool_calls):
        items.append(_call(call, turn_id, index, tools.get(call.name)))
    return items if request.begun is None else [item for item in items if not _got(request.begun, item)]


def _got(begun: Message, item: dict[str, Any]) -> bool:
    """Whether the harness already has an item of the turn."""
    if item["type"] == "reasoning":
        return bool(begun.reasoning)
    if item["type"] == "message":
        return bool(begun.content)
    return any(call.id == item["call_id"] for call in begun.tool_calls)


def _call(call: ToolCall, turn_id: str, index: int, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The item of a call; ``parameters`` are those of its tool, None if there is no such tool."""
    freeform = parameters == FREEFORM
    item: dict[str, Any] = {
        "type": "custom_tool_call" if freeform else "function_call",
        "id": bodies.reference(turn_id, "ctc" if freeform else "fc", index),
        "call_id": call.id,
        "name": call.name,
        "status": "completed",
    }
    if parameters is not None and "." in call.name:
        item["namespace"], _, item["name"] = call.name.partition(".")
    if not freeform:
        return item | {"arguments": call.arguments}
    value = bodies.argument_value(call.arguments)
    text = value.get("input") if isinstance(value, dict) else None
    return item | {"input": text if isinstance(text, str) else call.arguments}


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is when it begins."""
    empty: dict[str, Any] = {"arguments": "", "input": "", "content": []}
    begun = item | {name: value for name, value in empty.items() if name in item}
    return begun | {"status": "in_progress"} if "status" in item else begun


def _deltas(item: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The events between an item's beginning and its end."""
    kind = item["type"]
    if kind == "reasoning":
        text = item["content"][0]["text"]
        return [
            ("response.reasoning_text.delta", {"content_index": 0, "delta": text}),
            ("response.reasoning_text.done", {"content_index": 0, "text": text}),
        ]
    if kind == "message":
        part = item["content"][0]
        return [
            ("response.content_part.added", {"content_index": 0, "part": part | {"text": ""}}),
            ("response.output_text.delta", {"content_index": 0, "delta": part["text"], "logprobs": []}),
            ("response.output_text.done", {"content_index": 0, "text": part["text"], "logprobs": []}),
            ("response.content_part.done", {"content_index": 0, "part": part}),
        ]
    name, words = ("input", "custom_tool_call_input") if "input" in item else ("arguments", "function_call_arguments")
    done = {name: item[name]} if name == "input" else {name: item[name], "name": item["name"]}
    return [(f"response.{words}.delta", {"delta": item[name]}), (f"response.{words}.done", done)]


def _finished(request: ModelRequest, turn: Turn, items: list[dict[str, Any]]) -> dict[str, Any]:
    whole = _envelope(request, turn) | {"output": items, "status": "completed"}
    if turn.finish_reason != "stop":
        whole |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    prompt, output = turn.prompt_tokens, turn.output_tokens
    whole["usage"] = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": turn.cached_tokens},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }
    return whole


def _envelope(request: ModelRequest, turn: Turn) -> dict[str, Any]:
    return {
        "id": bodies.reference(turn.turn_id, "resp"),
        "object": "response",
        "created_at": turn.created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "metadata": {},
        "model": bodies.model_of(request),
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _event(number: int, kind: str, **fields: Any) -> bytes:
    return bodies.event(kind, {"type": kind, "sequence_number": number, **fields})
