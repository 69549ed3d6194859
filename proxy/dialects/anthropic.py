"""Anthropic Messages, the answering half: a ``Turn`` to a body or a stream, refusals in Anthropic's words.

A turn goes out as a thinking block, a text block and tool_use blocks, in this order: the one in which Claude Code
sends it back. Its id travels in the signature of the thinking block, which harnesses return verbatim. It knows neither
the router nor the ledger.
"""

from __future__ import annotations

from typing import Any

from infra.chat.messages import ToolCall
from proxy.conversation.requests import ModelRequest, Turn
from proxy.dialects import anthropic_request, bodies
from proxy.errors import BodyTooLarge, CallsExceeded, ContextExceeded, GatewayError, KeyRefused, UnknownPath

NAME: str = "anthropic"
PATHS: tuple[str, ...] = ("/v1/messages",)
FIELDS = anthropic_request.FIELDS
parse = anthropic_request.parse
parse_count = anthropic_request.parse_count
COUNT_PATH: str = "/v1/messages/count_tokens"
PING: bytes = bodies.event("ping", {"type": "ping"})

_STOPS = {"length": "max_tokens", "context": "model_context_window_exceeded"}


def count_tokens(tokens: int) -> bytes:
    """The answer to a request that only counts the tokens of its prompt."""
    return bodies.dump({"input_tokens": tokens})


def response(request: ModelRequest, turn: Turn) -> bytes:
    """The body of an answer without streaming."""
    message = _envelope(request, turn)
    message["content"] = [_whole(start, value) for start, value in _blocks(request, turn)]
    message["stop_reason"] = _stop(turn)
    message["usage"] = _usage(turn, turn.output_tokens)
    return bodies.dump(message)


def stream_start(request: ModelRequest, turn: Turn) -> bytes:
    """The first bytes of a stream; a ping follows at once, as the provider does."""
    return bodies.event("message_start", {"type": "message_start", "message": _envelope(request, turn)}) + PING


def stream_turn(request: ModelRequest, turn: Turn) -> bytes:
    """The whole turn, one delta to a block, and the end of the stream."""
    events = []
    for index, (start, value) in enumerate(_blocks(request, turn)):
        head = {"type": "content_block_start", "index": index, "content_block": start}
        events.append(bodies.event("content_block_start", head))
        for delta in _deltas(start["type"], value):
            event = {"type": "content_block_delta", "index": index, "delta": delta}
            events.append(bodies.event("content_block_delta", event))
        events.append(bodies.event("content_block_stop", {"type": "content_block_stop", "index": index}))
    end = {"stop_reason": _stop(turn), "stop_sequence": None}
    usage = _usage(turn, turn.output_tokens)
    events.append(bodies.event("message_delta", {"type": "message_delta", "delta": end, "usage": usage}))
    events.append(bodies.event("message_stop", {"type": "message_stop"}))
    return b"".join(events)


def stream_error(fault: GatewayError) -> bytes:
    """A refusal after the stream has begun: Claude Code asks again at once, without streaming."""
    return bodies.event("error", _error(fault))


def error(fault: GatewayError) -> bytes:
    """The body of a refusal."""
    return bodies.dump(_error(fault))


def _error(fault: GatewayError) -> dict[str, Any]:
    # Never overloaded_error: Claude Code counts three of those as a reason to give up, whatever their status.
    kind = "invalid_request_error" if fault.status < 500 else "api_error"
    message = str(fault)
    if isinstance(fault, ContextExceeded):
        # A prompt of exactly the limit does not fit either: there must be room for a token of the turn.
        message = f"prompt is too long: {fault.prompt} tokens > {min(fault.limit, fault.prompt - 1)} maximum"
    elif isinstance(fault, KeyRefused):
        kind, message = "authentication_error", f"invalid x-api-key: {fault}"
    elif isinstance(fault, CallsExceeded):
        message = f"You have reached your specified API usage limits: {fault}"
    elif isinstance(fault, BodyTooLarge):
        kind, message = "request_too_large", f"Request exceeds the maximum size: {fault}"
    elif isinstance(fault, UnknownPath):
        kind = "not_found_error"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _envelope(request: ModelRequest, turn: Turn) -> dict[str, Any]:
    return {
        "id": bodies.reference(turn.turn_id, "msg"),
        "type": "message",
        "role": "assistant",
        "model": bodies.model_of(request),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(turn, 0),
    }


def _usage(turn: Turn, output_tokens: int) -> dict[str, int]:
    """All prompt tokens as input tokens: Claude Code decides on compaction by the sum of the three."""
    return {
        "input_tokens": turn.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _blocks(request: ModelRequest, turn: Turn) -> list[tuple[dict[str, Any], Any]]:
    """Blocks as they start, each with what fills it: a text, a call, or (thinking, signature)."""
    message = turn.message
    blocks: list[tuple[dict[str, Any], Any]] = []
    thinking = request.asked.get("thinking")
    if message.reasoning or (isinstance(thinking, dict) and thinking.get("type") != "disabled"):
        signature = bodies.reference(turn.turn_id)
        blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, (message.reasoning, signature)))
    if message.content:
        blocks.append(({"type": "text", "text": ""}, message.content))
    for call in message.tool_calls:
        blocks.append(({"type": "tool_use", "id": call.id, "name": call.name, "input": {}}, call))
    return blocks


def _deltas(kind: str, value: Any) -> list[dict[str, Any]]:
    if kind == "text":
        return [{"type": "text_delta", "text": value}]
    if isinstance(value, ToolCall):
        return [{"type": "input_json_delta", "partial_json": value.arguments}]
    thought, signature = value
    deltas = [{"type": "thinking_delta", "thinking": thought}] if thought else []
    return [*deltas, {"type": "signature_delta", "signature": signature}]


def _whole(start: dict[str, Any], value: Any) -> dict[str, Any]:
    if start["type"] == "text":
        return start | {"text": value}
    if isinstance(value, ToolCall):
        return start | {"input": bodies.argument_value(value.arguments)}
    return start | {"thinking": value[0], "signature": value[1]}


def _stop(turn: Turn) -> str:
    return _STOPS.get(turn.finish_reason) or ("tool_use" if turn.message.tool_calls else "end_turn")
