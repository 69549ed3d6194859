"""OpenAI Responses, the asking half: a body to a ``ModelRequest``, and the closed table of its fields.

The items of one assistant turn (reasoning, message, calls) become one message; a new turn begins where an id that the
proxy minted says so. Tools of a namespace are flattened to ``NAMESPACE.NAME``, which no function may be called
otherwise, so the answering half can undo it. It knows no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from infra.chat.messages import Message, Role, Tool, ToolCall
from proxy.conversation.requests import Hints, ModelRequest
from proxy.dialects import bodies, openai_words
from proxy.dialects.dialect import Field, ignored, refused
from proxy.errors import BadRequest

ENCRYPTED = "reasoning.encrypted_content"
FREEFORM: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's whole input as plain text, not as JSON."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters that a tool of type custom is given: the policy calls every tool with JSON. They mark such a tool."""

_NO_STATE = "the proxy keeps no conversation for the client: send the whole input"
FIELDS: Mapping[str, Field] = {
    "model": Field("honoured", "recorded, and named in the answer; gyre-side marks a side call; the policy answers"),
    "input": Field("honoured", "text; messages, reasoning, function and custom calls with their outputs"),
    "instructions": Field("honoured", "the system prompt; without it, a system or developer message that comes first"),
    "tools": Field("honoured", "function, namespace and custom; hosted tools are left out and recorded"),
    "max_output_tokens": Field("honoured", "at most so many sampled tokens; the run's own bound still applies"),
    "stream": Field("honoured", ""),
    **ignored(f"{ENCRYPTED} is honoured; log-probabilities are refused; others have no effect", "include"),
    **ignored("auto and none are taken; a forced call is refused", "tool_choice"),
    **ignored("the format text is taken, others are refused; verbosity has no effect", "text"),
    **ignored("the policy thinks as it does", "reasoning"),
    **ignored("the policy calls as many tools as it does", "parallel_tool_calls"),
    **ignored("it counts calls of hosted tools, and there are none", "max_tool_calls"),
    **ignored("the run decides sampling", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"),
    **ignored("codex writes there what it also writes in headers", "client_metadata"),
    **ignored("", "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key"),
    **ignored("", "prompt_cache_retention", "prompt_cache_options", "stream_options", "moderation", "access_programs"),
    **refused(f"{_NO_STATE} (false is taken)", "store", taken=(False,)),
    **refused(_NO_STATE, "previous_response_id", "conversation"),
    **refused("there are no stored prompts", "prompt"),
    **refused("there are no background responses (false is taken)", "background", taken=(False,)),
    **refused("history is never rewritten (disabled is taken)", "truncation", taken=("disabled",)),
    **refused("history is never rewritten (an empty list is taken)", "context_management", taken=([],)),
    **refused("log-probabilities are not returned (0 is taken)", "top_logprobs", taken=(0,)),
    **refused("there are no server-side agents", "multi_agent"),
}

_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user"}
_TEXTS = {
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")
_NAME = re.compile(r"[^.]+")


def parse(body: bytes, headers: Mapping[bytes, bytes]) -> ModelRequest:
    """Read a request. Raises BadRequest naming the field."""
    data = bodies.load(body)
    asked = openai_words.check_fields(data, FIELDS, lambda name: f"Unknown parameter: '{name}'.")
    _check_asked(asked)
    tools, dropped = _tools(data.get("tools"))
    if dropped:
        asked["tools"] = dropped
    bodies.writable(asked, "metadata")
    messages, begun = _input(data.get("input"))
    system = None
    if instructions := bodies.text(data, "instructions"):
        system = Message("system", instructions)
    else:
        system, messages = _opening(messages)
    model = bodies.text(data, "model")
    return ModelRequest(
        model=model,
        system=system,
        messages=messages,
        tools=tools,
        max_tokens=bodies.positive(data, "max_output_tokens"),
        stream=bodies.flag(data, "stream"),
        asked=asked,
        hints=_hints(headers, model, only_hosted=bool(dropped) and not tools),
        begun=begun,
    )


def _check_asked(asked: Mapping[str, Any]) -> None:
    """Ignored fields of which not every value is harmless. Raises BadRequest."""
    include = asked.get("include")
    if include is not None:
        if not isinstance(include, list) or not all(isinstance(item, str) for item in include):
            raise BadRequest("Invalid type for 'include': expected an array of strings", param="include")
        if any("logprobs" in item for item in include):
            raise BadRequest(openai_words.refused("include", "log-probabilities are not returned"), param="include")
    text = asked.get("text")
    if text is not None:
        form = text.get("format") if isinstance(text, dict) else text
        if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
            raise BadRequest(openai_words.refused("text.format", "forced grammars are not supported"), param="text")


def _opening(messages: tuple[Message, ...]) -> tuple[Message | None, tuple[Message, ...]]:
    """The system prompt that stands first in the input, and what comes after it."""
    end = 0
    while end < len(messages) and messages[end].role == "system" and (end == 0 or messages[end].joined):
        end += 1
    if end in (0, len(messages)):
        return None, messages
    return Message("system", "\n\n".join(message.content for message in messages[:end])), messages[end:]


class _Turn:
    """An assistant turn while its items are read."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[ToolCall] = []
        self.turn_id = ""

    def message(self) -> Message:
        reasoning = "\n".join([thought for thought in self.thoughts if thought])
        return Message("assistant", "".join(self.texts), reasoning, tuple(self.calls), "", False, self.turn_id)


def _input(value: Any) -> tuple[tuple[Message, ...], Message | None]:
    """The messages, and what the harness got of a turn of ours before its connection broke: codex sends that along
    when it asks again. Raises BadRequest for any other turn at the end."""
    if isinstance(value, str):
        return (Message("user", value),), None
    if not isinstance(value, list) or not value:
        raise BadRequest("Invalid type for 'input': expected a string or a non-empty array", param="input")
    read: list[Message] = []
    turn: _Turn | None = None
    for position, item in enumerate(value):
        where = f"input[{position}]"
        if not isinstance(item, dict):
            raise BadRequest(f"Invalid type for '{where}': expected an object", param="input")
        kind = item.get("type", "message")
        if kind in ("reasoning", "function_call", "custom_tool_call") or (
            kind == "message" and item.get("role") == "assistant"
        ):
            turn_id = bodies.turn_of(item.get("id")) or bodies.turn_of(item.get("encrypted_content"))
            if turn is not None and turn_id and turn.turn_id and turn_id != turn.turn_id:
                read.append(turn.message())
                turn = None
            turn = turn or _Turn()
            turn.turn_id = turn.turn_id or turn_id
            _add(turn, kind, item, where)
            continue
        if turn is not None:
            read.append(turn.message())
            turn = None
        read += _blocks_of(kind, item, where)
    if (read and read[-1].role == "assistant") or not read or (turn is not None and not turn.turn_id):
        raise BadRequest("the last item must not be from the assistant: prefill is not supported", param="input")
    return tuple(read), None if turn is None else turn.message()


def _add(turn: _Turn, kind: str, item: dict[str, Any], where: str) -> None:
    if kind == "message":
        turn.texts += _texts(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        turn.thoughts += _texts(item.get("content"), f"{where}.content") or _texts(item.get("summary"), where)
    else:
        identity, name, space = item.get("call_id"), item.get("name"), item.get("namespace")
        if not isinstance(identity, str) or not isinstance(name, str) or not isinstance(space, str | None):
            raise BadRequest(f"'{where}': call_id, name and namespace must be strings", param="input")
        arguments = item.get("arguments" if kind == "function_call" else "input")
        if not isinstance(arguments, str):
            raise BadRequest(f"'{where}': arguments or input must be a string", param="input")
        if kind == "custom_tool_call":
            arguments = bodies.arguments({"input": arguments}, where)
        turn.calls.append(ToolCall(identity, f"{space}.{name}" if space else name, arguments))


def _blocks_of(kind: Any, item: dict[str, Any], where: str) -> list[Message]:
    """The blocks of an item that is not the assistant's."""
    if kind in ("function_call_output", "custom_tool_call_output"):
        call = item.get("call_id")
        if not isinstance(call, str):
            raise BadRequest(f"'{where}.call_id' must be a string", param="input")
        return [Message("tool", "\n".join(_texts(item.get("output"), f"{where}.output")), "", (), call)]
    if kind != "message":
        raise BadRequest(f"'{where}': items of type {kind} are not supported", param="input")
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise BadRequest(f"'{where}.role' must be system, developer, user or assistant", param="input")
    texts = _texts(item.get("content"), f"{where}.content") or [""]
    return [Message(role, text, "", (), "", number > 0) for number, text in enumerate(texts)]


def _texts(content: Any, where: str) -> list[str]:
    return openai_words.texts(content, where, _TEXTS, "input")


def _tools(tools: Any) -> tuple[tuple[Tool, ...], list[dict[str, Any]]]:
    """The tools that the harness runs, and those that the provider would have to run."""
    read: list[Tool] = []
    dropped = []
    for position, tool in enumerate(bodies.array(tools, "Invalid type for 'tools': expected an array", "tools")):
        where = f"tools[{position}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace":
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise BadRequest(f"'{where}.tools' must be an array", param="tools")
            space = _name(tool, where) + "."
            read += [_tool(member, f"{where}.tools[{place}]", space) for place, member in enumerate(inner)]
        elif kind in ("function", "custom"):
            read.append(_tool(tool, where))
        elif isinstance(kind, str) and kind.startswith(_HOSTED):
            dropped.append(tool)
        else:
            raise BadRequest(f"'{where}': tools of type {kind} are not supported: give a function", param="tools")
    bodies.writable(tools, "tools")
    return tuple(read), dropped


def _tool(tool: Any, where: str, space: str = "") -> Tool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        raise BadRequest(f"'{where}': tools of type {kind} are not supported here", param="tools")
    name, description = space + _name(tool, where), tool.get("description") or ""
    parameters = tool.get("parameters") or {} if kind == "function" else FREEFORM
    if not isinstance(description, str) or not isinstance(parameters, dict):
        raise BadRequest(f"'{where}': bad description or parameters", param="tools")
    form = tool.get("format")
    if kind == "custom" and isinstance(form, dict) and isinstance(form.get("definition"), str):
        # The provider would force this grammar; here the policy is told of it.
        description = f"{description}\n\nThe input has this form ({form.get('syntax')}):\n{form['definition']}"
    return Tool(name, description, parameters)


def _name(tool: dict[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(f"Invalid '{where}.name': expected a string without a dot", param="tools")
    return name


def _hints(headers: Mapping[bytes, bytes], model: str, *, only_hosted: bool) -> Hints:
    """What codex says in its headers. A sub-agent is named by its thread; the main agent's thread is the session."""
    side = True if only_hosted else bodies.side(model)
    metadata = _metadata(bodies.header(headers, b"x-codex-turn-metadata"))
    if not metadata:
        return Hints(side=side)
    session, name, kind = (str(metadata.get(key, "")) for key in ("session_id", "agent_name", "subagent_kind"))
    thread = str(metadata.get("thread_id", "")) or bodies.header(headers, b"x-codex-window-id").partition(":")[0]
    parent = str(metadata.get("parent_thread_id", ""))
    asks = metadata.get("request_kind")
    sub_agent = bool(kind or parent or metadata.get("thread_source") == "subagent" or name not in ("", "/root"))
    return Hints(
        agent=(thread or name) if sub_agent else "",
        parent=parent if sub_agent and parent != session else "",
        sub_agent=sub_agent,
        summary=True if asks == "compaction" else False if asks == "turn" else None,
        side=side,
    )


def _metadata(header: str) -> dict[str, Any]:
    try:
        metadata = json.loads(header)
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}
