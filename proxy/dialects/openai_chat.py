"""OpenAI Chat Completions: request body to ``ModelRequest``, ``Turn`` to response or stream, errors in its words.

The dialect has no place for a turn's id: its turns are known again by the minted ids of their tool calls, else by
their content. It knows neither tokens nor cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from infra.chat.messages import Message, Role, Tool, ToolCall
from proxy.conversation.requests import Hints, ModelRequest, Turn
from proxy.dialects import bodies, openai_words
from proxy.dialects.dialect import Field, ignored, refused
from proxy.dialects.openai_words import error_object
from proxy.errors import BadRequest, GatewayError

NAME: str = "openai_chat"
PATHS: tuple[str, ...] = ("/v1/chat/completions", "/chat/completions")
PING: bytes = b": keep-alive\n\n"

_NO_STOPS = "stop sequences are not supported (an empty list is taken)"
_NO_LOGPROBS = "log-probabilities are not returned"
_NO_GRAMMAR = "forced grammars are not supported"
_TEXT_FORMAT = {"type": "text"}
FIELDS: Mapping[str, Field] = {
    "model": Field("honoured", "recorded, and named in the answer; gyre-side marks a side call; the policy answers"),
    "messages": Field("honoured", "text; roles system, developer, user, assistant (reasoning_content kept) and tool"),
    "tools": Field("honoured", "of type function"),
    "max_tokens": Field("honoured", "at most so many sampled tokens; the run's own bound still applies"),
    "max_completion_tokens": Field("honoured", "the same; the smaller of the two"),
    "stream": Field("honoured", ""),
    "stream_options": Field("honoured", "include_usage"),
    **ignored("the run decides sampling", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty"),
    **ignored("the run decides sampling", "frequency_penalty", "repetition_penalty", "min_tokens", "do_sample"),
    **ignored("auto and none are taken; a forced call is refused", "tool_choice"),
    **ignored("the policy calls as many tools as it does", "parallel_tool_calls"),
    **ignored("the policy thinks as it does", "reasoning_effort", "reasoning", "include_reasoning", "thinking"),
    **ignored("the policy thinks as it does", "enable_thinking", "thinking_budget", "chat_template_kwargs"),
    **ignored("", "verbosity", "prediction", "enable_search", "vl_high_resolution_images", "user", "metadata"),
    **ignored("", "store", "service_tier", "safety_identifier", "moderation", "prompt_cache_key"),
    **ignored("", "prompt_cache_retention", "prompt_cache_options", "cache_salt"),
    **ignored("of a router that is not here", "provider", "usage", "transforms", "plugins"),
    **refused("one turn is sampled (1 is taken)", "n", taken=(1,)),
    **refused(_NO_STOPS, "stop", "stop_token_ids", taken=([],)),
    **refused("it changes what the policy samples (an empty object is taken)", "logit_bias", taken=({},)),
    **refused("it changes what the policy samples (an empty list is taken)", "bad_words", taken=([],)),
    **refused("it changes what the policy samples (false is taken)", "ignore_eos", taken=(False,)),
    **refused(f"{_NO_LOGPROBS} (false is taken)", "logprobs", taken=(False,)),
    **refused(f"{_NO_LOGPROBS} (0 is taken)", "top_logprobs", "prompt_logprobs", taken=(0,)),
    **refused(f"{_NO_GRAMMAR} (the type text is taken)", "response_format", taken=(_TEXT_FORMAT,)),
    **refused(_NO_GRAMMAR, "guided_json", "guided_regex", "guided_grammar", "guided_choice"),
    **refused(_NO_GRAMMAR, "structured_outputs", "regex", "ebnf", "json_schema"),
    **refused("text only (a list of text is taken)", "modalities", taken=(["text"],)),
    **refused("audio output is not supported", "audio"),
    **refused("there is no web search", "web_search_options"),
    **refused("replaced by tools (an empty list is taken)", "functions", taken=([],)),
    **refused("replaced by tool_choice (auto and none are taken)", "function_call", taken=("auto", "none")),
    **refused("one turn is sampled (1 is taken)", "best_of", taken=(1,)),
    **refused("one turn is sampled (false is taken)", "use_beam_search", taken=(False,)),
    **refused("use messages", "suffix", "prompt"),
    **refused("the prompt is not returned (false is taken)", "echo", taken=(False,)),
    **refused("prefill is not supported (false is taken)", "continue_final_message", taken=(False,)),
    **refused("the run's template is used", "chat_template"),
    **refused("history is never rewritten", "truncate_prompt_tokens"),
}

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TEXTS = {"text": "text", "refusal": "refusal"}
_SESSION = "x-session-id"


def parse(body: bytes, headers: Mapping[bytes, bytes]) -> ModelRequest:
    """Read a request. Raises BadRequest naming the field."""
    data = bodies.load(body)
    asked = openai_words.check_fields(data, FIELDS, lambda name: f"Unrecognized request argument supplied: {name}")
    session = bodies.header(headers, _SESSION.encode())
    if session:
        asked[_SESSION] = session
    bodies.writable(asked, "metadata")
    system, messages = _messages(data.get("messages"))
    limits = (bodies.positive(data, "max_tokens"), bodies.positive(data, "max_completion_tokens"))
    options = data.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("'stream_options' must be an object", param="stream_options")
    model = bodies.text(data, "model")
    return ModelRequest(
        model=model,
        system=system,
        messages=messages,
        tools=_tools(data.get("tools")),
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        stream=bodies.flag(data, "stream"),
        include_usage=bool(options and options.get("include_usage")),
        asked=asked,
        hints=Hints(side=bodies.side(model)),
    )


def response(request: ModelRequest, turn: Turn) -> bytes:
    """The body of an answer without streaming."""
    sampled = turn.message
    content = None if sampled.tool_calls and not sampled.content else sampled.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if sampled.reasoning:
        message["reasoning_content"] = sampled.reasoning
    if sampled.tool_calls:
        message["tool_calls"] = [_call(call) for call in sampled.tool_calls]
    choice = {"index": 0, "message": message, "finish_reason": _finish(turn), "logprobs": None}
    head = _envelope(request, turn, "chat.completion")
    return bodies.dump(head | {"choices": [choice], "usage": _usage(turn)})


def stream_start(request: ModelRequest, turn: Turn) -> bytes:
    """The first bytes of a stream."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return bodies.data_event(_envelope(request, turn, "chat.completion.chunk") | {"choices": [choice]})


def stream_turn(request: ModelRequest, turn: Turn) -> bytes:
    """The whole turn in one event, and the end of the stream.

    One event, so that a connection that breaks leaves a harness with all of the turn or with nothing of it: some take
    the text of half a turn for the end of the work. The usage is in it and, where it was asked for, in the event of its
    own that the dialect has for it.
    """
    sampled = turn.message
    delta: dict[str, Any] = {}
    if sampled.reasoning:
        delta["reasoning_content"] = sampled.reasoning
    if sampled.content:
        delta["content"] = sampled.content
    if sampled.tool_calls:
        delta["tool_calls"] = [{"index": index, **_call(call)} for index, call in enumerate(sampled.tool_calls)]
    head, usage = _envelope(request, turn, "chat.completion.chunk"), _usage(turn)
    choice = {"index": 0, "delta": delta, "finish_reason": _finish(turn)}
    events = [bodies.data_event(head | {"choices": [choice], "usage": usage})]
    if request.include_usage:
        events.append(bodies.data_event(head | {"choices": [], "usage": usage}))
    return b"".join(events) + b"data: [DONE]\n\n"


def stream_error(fault: GatewayError) -> bytes:
    """A refusal after the stream has begun."""
    return bodies.data_event({"error": error_object(fault)})


def error(fault: GatewayError) -> bytes:
    """The body of a refusal."""
    return bodies.dump({"error": error_object(fault)})


def models(name: str) -> bytes:
    """The answer to GET /v1/models."""
    return bodies.dump({"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "gyre"}]})


def _messages(value: Any) -> tuple[Message | None, tuple[Message, ...]]:
    """What opens the conversation, and the messages after it."""
    if not isinstance(value, list) or not value:
        raise BadRequest("'messages' must be a non-empty array", param="messages")
    read: list[Message] = []
    system: Message | None = None
    for position, message in enumerate(value):
        where = f"messages[{position}]"
        role = _ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
        if role is None:
            raise BadRequest(f"'{where}.role' must be system, developer, user, assistant or tool", param="messages")
        texts = openai_words.texts(message.get("content"), f"{where}.content", _TEXTS, "messages", plain=True)
        if role == "assistant":
            read.append(_assistant(message, "".join(texts), where))
        elif role == "tool":
            read.append(Message("tool", "\n".join(texts), "", (), _identity(message.get("tool_call_id"), where)))
        elif role == "system" and position == 0 and len(value) > 1:
            system = Message("system", "\n\n".join(texts))
        else:
            read.append(Message(role, texts[0] if texts else ""))
            read += [Message(role, text, "", (), "", True) for text in texts[1:]]
    if read[-1].role == "assistant":
        raise BadRequest("the last message must not be from the assistant: prefill is not supported", param="messages")
    return system, tuple(read)


def _assistant(message: dict[str, Any], content: str, where: str) -> Message:
    if message.get("function_call") or message.get("audio"):
        raise BadRequest(f"'{where}': function_call and audio are not supported", param="messages")
    reasoning = ""
    for name in ("reasoning_content", "reasoning"):
        text = message.get(name)
        if text is not None and not isinstance(text, str):
            raise BadRequest(f"'{where}.{name}' must be a string", param="messages")
        reasoning = reasoning or text or ""
    return Message("assistant", content, reasoning, tuple(_tool_calls(message.get("tool_calls"), where)))


def _tool_calls(calls: Any, where: str) -> Iterator[ToolCall]:
    for call in bodies.array(calls, f"'{where}.tool_calls' must be an array", "messages"):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"'{where}.tool_calls' must have a function with a name", param="messages")
        arguments = function.get("arguments")
        if arguments is None or isinstance(arguments, dict | list):
            arguments = bodies.arguments(arguments or {}, where)
        if not isinstance(arguments, str):
            raise BadRequest(f"'{where}.tool_calls': arguments must be JSON text", param="messages")
        yield ToolCall(_identity(call.get("id"), where), function["name"], arguments)


def _identity(value: Any, where: str) -> str:
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"'{where}': ids must be strings", param="messages")
    return value or ""


def _tools(tools: Any) -> tuple[Tool, ...]:
    read = []
    for position, tool in enumerate(bodies.array(tools, "'tools' must be an array", "tools")):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"'tools[{position}]' must be a function with a name", param="tools")
        description, parameters = function.get("description") or "", function.get("parameters") or {}
        if not isinstance(description, str) or not isinstance(parameters, dict):
            raise BadRequest(f"'tools[{position}]': bad description or parameters", param="tools")
        read.append(Tool(function["name"], description, parameters))
    bodies.writable(tools, "tools")
    return tuple(read)


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
    identity = bodies.reference(turn.turn_id, "chatcmpl")
    return {"id": identity, "object": kind, "created": turn.created, "model": bodies.model_of(request)}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
