"""Anthropic Messages, the asking half: a body to a ``ModelRequest``, and the closed table of its fields.

What Claude Code writes differently from turn to turn without meaning a difference is gone after ``parse``: cache
marks, strings for single text blocks, the billing line that opens its system prompt. It knows no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.chat.messages import Message, Role, Tool, ToolCall
from proxy.conversation.requests import Hints, ModelRequest
from proxy.dialects import bodies
from proxy.dialects.dialect import Field, ignored, refused
from proxy.errors import BadRequest

FIELDS: Mapping[str, Field] = {
    "model": Field("honoured", "recorded, and named in the answer; the policy answers whatever it says"),
    "messages": Field("honoured", "text, thinking, tool_use and tool_result blocks; roles user, assistant and system"),
    "system": Field("honoured", "text; a line that begins with x-anthropic-billing-header is dropped"),
    "tools": Field("honoured", "tools with an input_schema; tools that the provider runs are left out and recorded"),
    "max_tokens": Field("honoured", "at most so many sampled tokens; the run's own bound still applies"),
    "stream": Field("honoured", ""),
    **ignored("auto and none are taken; a forced call is refused", "tool_choice"),
    **ignored("adaptive, enabled and disabled are taken; the policy thinks as it does", "thinking"),
    **ignored("clear_thinking with keep all is taken; what rewrites history is refused", "context_management"),
    **ignored("effort has no effect; a format is refused", "output_config"),
    **ignored("", "metadata"),
    **ignored("the run decides sampling", "temperature", "top_p", "top_k"),
    **ignored("", "service_tier", "speed", "inference_geo"),
    **ignored("prefixes are always cached; so are marks on blocks", "cache_control"),
    **ignored("", "betas", "anthropic_beta", "anthropic_version"),
    **ignored("", "user_profile_id", "diagnostics", "fallback_credit_token"),
    **refused("stop sequences are not supported (an empty list is taken)", "stop_sequences", taken=([],)),
    **refused("forced grammars are not supported", "output_format"),
    **refused("there are no containers", "container"),
    **refused("there are no server-side tools (an empty list is taken)", "mcp_servers", taken=([],)),
    **refused("there is one policy (an empty list is taken)", "fallbacks", taken=([],)),
}

_BILLING = "x-anthropic-billing-header"
_PROVIDER_RUN = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")
_UNREADABLE = {
    "image": "images are not supported: the policy reads text only",
    "document": "documents are not supported: the policy reads text only",
    "redacted_thinking": "redacted thinking is not supported: it cannot be read",
}


def parse(body: bytes, headers: Mapping[bytes, bytes]) -> ModelRequest:
    """Read a request. Raises BadRequest naming the field."""
    return _parse(body, headers, counts=False)


def parse_count(body: bytes, headers: Mapping[bytes, bytes]) -> ModelRequest:
    """Read a request to count the tokens of a prompt: the same, without ``max_tokens``. Raises BadRequest."""
    return _parse(body, headers, counts=True)


def _parse(body: bytes, headers: Mapping[bytes, bytes], *, counts: bool) -> ModelRequest:
    data = bodies.load(body)
    asked = bodies.check_fields(
        data, FIELDS, lambda name: f"{name}: Extra inputs are not permitted", lambda n, note: f"{n}: {note}"
    )
    _check_asked(asked)
    if "messages" not in data:
        raise BadRequest("messages: Field required", param="messages")
    max_tokens = bodies.positive(data, "max_tokens")
    if max_tokens is None and not counts:
        raise BadRequest("max_tokens: Field required", param="max_tokens")
    system, billing = _system(data.get("system"))
    raw = data["messages"]
    messages = _messages(raw)
    tools, dropped = _tools(data.get("tools"))
    if dropped:
        asked["tools"] = dropped
    bodies.writable(asked, "metadata")
    model = bodies.text(data, "model")
    return ModelRequest(
        model=model,
        system=system,
        messages=messages,
        tools=tools,
        max_tokens=max_tokens,
        stream=bodies.flag(data, "stream"),
        asked=asked,
        hints=_hints(headers, billing, raw, model=model, only_provider_tools=bool(dropped) and not tools),
    )


def _check_asked(asked: Mapping[str, Any]) -> None:
    """Ignored fields of which not every value is harmless. Raises BadRequest."""
    for name, kinds in (("tool_choice", ("auto", "none")), ("thinking", ("adaptive", "enabled", "disabled"))):
        value = asked.get(name)
        if value is not None and (not isinstance(value, dict) or value.get("type") not in kinds):
            raise BadRequest(f"{name}: type must be one of {', '.join(kinds)}", param=name)
    config = asked.get("output_config")
    if config is not None and (not isinstance(config, dict) or config.get("format") is not None):
        raise BadRequest("output_config.format: forced grammars are not supported", param="output_config")
    management = asked.get("context_management")
    if management is None:
        return
    edits = management.get("edits", []) if isinstance(management, dict) else None
    if not isinstance(edits, list):
        raise BadRequest("context_management.edits: must be a list", param="context_management")
    for edit in edits:
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not (isinstance(kind, str) and kind.startswith("clear_thinking_") and edit.get("keep") == "all"):
            raise BadRequest(
                f"context_management.edits: {kind} would rewrite history; only clear_thinking with keep all is taken",
                param="context_management",
            )


def _system(value: Any) -> tuple[Message | None, str]:
    """The system prompt, and the billing line that was taken out of it."""
    if value is None:
        return None, ""
    billing = ""
    texts = []
    for block in [{"type": "text", "text": value}] if isinstance(value, str) else _blocks(value, "system"):
        text = _text(block, "system")
        if text.startswith(_BILLING):
            billing, _, text = text.partition("\n")
        if text:
            texts.append(text)
    return (Message("system", "\n\n".join(texts)) if texts else None), billing


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise BadRequest("messages: Input should be a valid list", param="messages")
    if not value:
        raise BadRequest("messages: at least one message is required", param="messages")
    read: list[Message] = []
    for position, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        if role == "assistant":
            read.append(_assistant(message.get("content"), position))
        elif role in ("user", "system"):
            content = message.get("content")
            if isinstance(content, str):
                read.append(Message(role, content))
            else:
                read += _blocks_of(role, content, position)
        else:
            raise BadRequest(f"messages.{position}.role: must be user, assistant or system", param="messages")
    if read[-1].role == "assistant":
        raise BadRequest(
            "messages: this model does not support assistant message prefill; the last message must be the user's",
            param="messages",
        )
    return tuple(read)


def _blocks_of(role: Role, content: Any, position: int) -> list[Message]:
    """The blocks of a user's or system message; the later ones stand in the same turn."""
    where = f"messages.{position}.content"
    read: list[Message] = []
    for block in _blocks(content, where):
        if isinstance(block, dict) and block.get("type") == "tool_result" and role == "user":
            call = block.get("tool_use_id")
            if not isinstance(call, str):
                raise BadRequest(f"{where}: tool_result.tool_use_id: must be a string", param="messages")
            read.append(Message("tool", _result(block.get("content"), where), "", (), call, bool(read)))
        else:
            read.append(Message(role, _text(block, where), "", (), "", bool(read)))
    return read or [Message(role)]


def _result(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    return "\n".join([_text(block, where) for block in _blocks(content, where)])


def _assistant(content: Any, position: int) -> Message:
    if isinstance(content, str):
        return Message("assistant", content)
    where = f"messages.{position}.content"
    blocks = _blocks(content, where)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    turn_id = ""
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            identity, name = block.get("id"), block.get("name")
            if not isinstance(identity, str) or not isinstance(name, str):
                raise BadRequest(f"{where}: tool_use: id and name must be strings", param="messages")
            calls.append(ToolCall(identity, name, bodies.arguments(block.get("input", {}), where)))
        elif kind == "thinking":
            thought = block.get("thinking")
            if not isinstance(thought, str):
                raise BadRequest(f"{where}: thinking.thinking: must be a string", param="messages")
            thoughts.append(thought)
            turn_id = turn_id or bodies.turn_of(block.get("signature"))
        else:
            text = _text(block, where)
            if len(blocks) == 1 or (text and not text.isspace()):
                texts.append(text)
    return Message("assistant", "".join(texts), "\n".join([t for t in thoughts if t]), tuple(calls), "", False, turn_id)


def _blocks(content: Any, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise BadRequest(f"{where}: must be a string or a list of blocks", param=where)
    return content


def _text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        why = _UNREADABLE.get(str(kind), f"a block of type {kind} is not supported here")
        raise BadRequest(f"{where}: {why}", param=where)
    text = block.get("text")
    if not isinstance(text, str):
        raise BadRequest(f"{where}: text.text: must be a string", param=where)
    return text


def _tools(tools: Any) -> tuple[tuple[Tool, ...], list[dict[str, Any]]]:
    """The tools that the harness runs, and those that the provider would have to run."""
    read, dropped = [], []
    for position, tool in enumerate(bodies.array(tools, "tools: Input should be a valid list", "tools")):
        where = f"tools.{position}"
        if not isinstance(tool, dict):
            raise BadRequest(f"{where}: must be an object", param="tools")
        kind = tool.get("type")
        if isinstance(kind, str) and kind.startswith(_PROVIDER_RUN):
            dropped.append(tool)
            continue
        if kind not in (None, "custom"):
            raise BadRequest(f"{where}: tools of type {kind} are not supported: give an input_schema", param="tools")
        name, description, schema = tool.get("name"), tool.get("description") or "", tool.get("input_schema")
        if not isinstance(name, str) or not isinstance(description, str) or not isinstance(schema, dict):
            raise BadRequest(f"{where}: must have a name, a description and an input_schema", param="tools")
        read.append(Tool(name, description, schema))
    bodies.writable(tools, "tools")
    return tuple(read), dropped


def _hints(
    headers: Mapping[bytes, bytes], billing: str, messages: Any, *, model: str, only_provider_tools: bool
) -> Hints:
    agent = bodies.header(headers, b"x-claude-code-agent-id")
    sub_agent: bool | None = None
    if agent or "cc_is_subagent=true" in billing:
        sub_agent = True
    elif billing or b"x-claude-code-session-id" in headers:
        sub_agent = False
    summary: bool | None = None
    if _marked(messages[-1]):
        summary = False
    elif any(_marked(message) for message in messages[-3:-1]):  # a reminder may stand behind the request for it
        summary = True
    return Hints(
        agent=agent,
        parent=bodies.header(headers, b"x-claude-code-parent-agent-id"),
        sub_agent=sub_agent,
        summary=summary,
        side=True if only_provider_tools else bodies.side(model),
    )


def _marked(message: dict[str, Any]) -> bool:
    """Whether a block of the message is marked for caching: Claude Code marks where it will go on."""
    content = message.get("content")
    return isinstance(content, list) and any(block.get("cache_control") is not None for block in content)
