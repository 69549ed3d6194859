"""OpenAI Chat Completions: request body to ``ModelRequest``, ``Turn`` to response or stream, errors in its words.

Every field of a request is in one of three closed sets: honoured, refused with a 400, or ignored and recorded.
A field that is in none of them is ignored and recorded too. It knows neither tokens nor cells.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
import xxhash

from infra.chat.messages import Message, Tool, ToolCall
from proxy.calls import ModelRequest, Turn
from proxy.errors import BadRequest, CallsExceeded, ContextExceeded, GatewayError, KeyRefused, UnknownPath
from proxy.notes import message_key, root_key

PATHS = ("/v1/chat/completions", "/chat/completions")
PING = b": keep-alive\n\n"

HONOURED = frozenset(
    {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options", "n"}
)
REFUSED: Mapping[str, str] = {
    "logit_bias": "logit_bias changes what the policy samples",
    "functions": "functions are replaced by tools",
    "function_call": "function_call is replaced by tool_choice",
    "stop": "stop sequences are not supported",
    "audio": "audio output is not supported",
    "web_search_options": "there is no web search",
    "logprobs": "log-probabilities are not returned",
    "top_logprobs": "log-probabilities are not returned",
    "best_of": "best_of is not supported",
    "suffix": "suffix is not supported",
    "echo": "echo is not supported",
    "prompt": "use messages",
    "guided_json": "forced grammars are not supported",
    "guided_regex": "forced grammars are not supported",
    "guided_grammar": "forced grammars are not supported",
    "guided_choice": "forced grammars are not supported",
    "structured_outputs": "forced grammars are not supported",
}
"""Refused unless null, false, zero or empty."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def parse(body: bytes) -> ModelRequest:
    """Read a request body. Raises BadRequest naming the field."""
    data = _load(body)
    _refuse(data)
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("'messages' must be a non-empty array", param="messages")
    read = tuple(_message(message, position) for position, message in enumerate(messages))
    if read[-1].role == "assistant":
        raise BadRequest("the last message must not be from the assistant: prefill is not supported", param="messages")
    tools = _tools(data.get("tools"))
    max_tokens = _max_tokens(data)
    options = data.get("stream_options")
    model = data.get("model")
    asked = {name: value for name, value in data.items() if name not in HONOURED and value is not None}
    system = read[0] if read[0].role == "system" else None
    digest = xxhash.xxh3_128(root_key(system, tools))
    for message in read:
        digest.update(message_key(message))
    digest.update(_dump([max_tokens, asked]))
    return ModelRequest(
        model=model if isinstance(model, str) else "",
        messages=read,
        tools=tools,
        max_tokens=max_tokens,
        stream=_flag(data, "stream"),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        asked=asked,
        digest=digest.digest(),
    )


def response(request: ModelRequest, turn: Turn) -> bytes:
    """The body of an answer without streaming."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.message.content or None, "refusal": None}
    if turn.message.reasoning:
        message["reasoning_content"] = turn.message.reasoning
    if turn.message.tool_calls:
        message["tool_calls"] = [_call(call) for call in turn.message.tool_calls]
    elif not turn.message.content:
        message["content"] = ""
    choice = {"index": 0, "message": message, "finish_reason": _finish(turn), "logprobs": None}
    return _dump(_envelope(request, turn, "chat.completion") | {"choices": [choice], "usage": _usage(turn)})


def stream(request: ModelRequest, turn: Turn) -> bytes:
    """The events of a finished turn, in one piece."""
    head = _envelope(request, turn, "chat.completion.chunk")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if turn.message.reasoning:
        deltas.append({"reasoning_content": turn.message.reasoning})
    if turn.message.content:
        deltas.append({"content": turn.message.content})
    for index, call in enumerate(turn.message.tool_calls):
        deltas.append({"tool_calls": [{"index": index, **_call(call)}]})
    events = [head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish(turn)}]})
    if request.include_usage:
        events.append(head | {"choices": [], "usage": _usage(turn)})
    return b"".join(_event(event) for event in events) + b"data: [DONE]\n\n"


def error(fault: GatewayError) -> bytes:
    """The body of a refusal."""
    return _dump({"error": _error(fault)})


def error_event(fault: GatewayError) -> bytes:
    """A refusal after the stream has begun."""
    return _event({"error": _error(fault)})


def models(name: str) -> bytes:
    """The answer to GET /v1/models."""
    return _dump({"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "gyre"}]})


def _error(fault: GatewayError) -> dict[str, Any]:
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


def _load(body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:  # lone surrogates of undecodable tool output: valid JSON text, refused by orjson
            data = _scrub(json.loads(body))
        except (ValueError, RecursionError) as fault:
            raise BadRequest("could not parse the JSON body of your request") from fault
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object")
    return data


def _scrub(value: Any) -> Any:
    """The value with lone surrogates replaced by U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_scrub(item) for item in value]
    if isinstance(value, dict):
        return {_scrub(name): _scrub(item) for name, item in value.items()}
    return value


def _refuse(data: dict[str, Any]) -> None:
    for name, why in REFUSED.items():
        if data.get(name):
            raise BadRequest(f"Unsupported parameter: '{name}': {why}", param=name)
    if data.get("n") not in (None, 1):
        raise BadRequest("Unsupported value: 'n' must be 1", param="n")
    form = data.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise BadRequest("Unsupported value: 'response_format' must be of type text", param="response_format")
    if data.get("tool_choice") not in (None, "auto", "none"):
        raise BadRequest("Unsupported value: 'tool_choice' must be auto: a call is never forced", param="tool_choice")
    if data.get("modalities") not in (None, ["text"]):
        raise BadRequest("Unsupported value: 'modalities' must be text", param="modalities")


def _max_tokens(data: dict[str, Any]) -> int | None:
    bounds = []
    for name in ("max_tokens", "max_completion_tokens"):
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(f"'{name}' must be a positive integer", param=name)
        bounds.append(value)
    return min(bounds, default=None)


def _message(value: Any, position: int) -> Message:
    where = f"messages[{position}]"
    role = _ROLES.get(str(value.get("role"))) if isinstance(value, dict) else None
    if role is None:
        raise BadRequest(f"'{where}.role' must be system, developer, user, assistant or tool", param=where)
    if value.get("function_call") or value.get("audio"):
        raise BadRequest(f"'{where}': function_call and audio are not supported", param=where)
    fields: dict[str, Any] = {"role": role, "content": _text(value.get("content"), where)}
    if role == "assistant":
        fields["reasoning"] = _reasoning(value, where)
        fields["tool_calls"] = tuple(_tool_calls(value.get("tool_calls"), where))
    if role == "tool" and isinstance(value.get("tool_call_id"), str):
        fields["tool_call_id"] = value["tool_call_id"]
    return Message(**fields)


def _text(content: Any, where: str) -> str:
    """Text of a content field: a string, nothing, or a list of text parts (one line break between parts)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"'{where}.content' must be a string or an array of parts", param=where)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise BadRequest(f"'{where}.content': only parts of type text are supported", param=where)
    return "\n".join(texts)


def _reasoning(value: dict[str, Any], where: str) -> str:
    for name in ("reasoning_content", "reasoning"):
        text = value.get(name)
        if text is not None and not isinstance(text, str):
            raise BadRequest(f"'{where}.{name}' must be a string", param=where)
        if text:
            return str(text)
    return ""


def _tool_calls(calls: Any, where: str) -> Iterable[ToolCall]:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise BadRequest(f"'{where}.tool_calls' must be an array", param=where)
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"'{where}.tool_calls' must have a function with a name", param=where)
        arguments = function.get("arguments")
        if arguments is None or isinstance(arguments, dict | list):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        if not isinstance(arguments, str):
            raise BadRequest(f"'{where}.tool_calls': arguments must be JSON text", param=where)
        identity = call.get("id")
        yield ToolCall(id=identity if isinstance(identity, str) else "", name=function["name"], arguments=arguments)


def _tools(tools: Any) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise BadRequest("'tools' must be an array", param="tools")
    read = []
    for position, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"'tools[{position}]' must be a function with a name", param="tools")
        description, parameters = function.get("description") or "", function.get("parameters") or {}
        if not isinstance(description, str) or not isinstance(parameters, dict):
            raise BadRequest(f"'tools[{position}]': bad description or parameters", param="tools")
        read.append(Tool(name=function["name"], description=description, parameters=parameters))
    return tuple(read)


def _flag(data: dict[str, Any], name: str) -> bool:
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"'{name}' must be true or false", param=name)
    return bool(value)


def _finish(turn: Turn) -> str:
    if turn.finish_reason != "stop":
        return "length"
    return "tool_calls" if turn.message.tool_calls else "stop"


def _usage(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.output_tokens,
        "total_tokens": turn.prompt_tokens + turn.output_tokens,
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
    }


def _envelope(request: ModelRequest, turn: Turn, kind: str) -> dict[str, Any]:
    return {"id": turn.response_id, "object": kind, "created": turn.created, "model": request.model}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _event(event: dict[str, Any]) -> bytes:
    return b"data: " + _dump(event) + b"\n\n"


def _dump(value: Any) -> bytes:
    return orjson.dumps(value)
