"""The messages behind a call record, stored beside it so that a ledger can be rebuilt.

A stored turn is a delta like its record: it names how many nodes of the parent call's path it shares, and lists the
nodes that the call added with the token position at which each ends. The tokens themselves are in the record.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
import xxhash

from infra.chat.messages import Message, Role, Tool, ToolCall


class StoredMessage(msgspec.Struct, frozen=True, array_like=True):
    role: str
    content: str
    reasoning: str
    calls: list[tuple[str, str, str]]
    """(id, name, arguments) of each tool call."""
    tool_call_id: str
    joined: bool = False
    turn_id: str = ""


class StoredNode(msgspec.Struct, frozen=True, array_like=True):
    end: int
    """Tokens from the start of the conversation to the end of this node."""
    message: StoredMessage | None
    """None: the root block, named by ``root``."""
    root: bytes
    synthetic: bool
    rewritten: bool
    closed: bool
    sampled_by: int = -1
    partial: bool = False


class StoredTurn(msgspec.Struct, frozen=True, array_like=True):
    rid: str
    name: bytes
    """``ModelRequest.name``, by which the request is recognised when it is sent again."""
    turn_id: str
    cached_tokens: int
    depth: int
    """Nodes shared with the path of the record's parent."""
    nodes: list[StoredNode]
    message: StoredMessage
    """The turn as it was delivered, with the minted ids."""
    asked: dict[str, Any]
    """What the harness asked for and the run decided otherwise, or ignored."""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(StoredTurn).decode


def stored_message(message: Message) -> StoredMessage:
    return StoredMessage(
        message.role,
        message.content,
        message.reasoning,
        _calls(message),
        message.tool_call_id,
        message.joined,
        message.turn_id,
    )


def message_of(stored: StoredMessage) -> Message:
    return Message(
        role=cast(Role, stored.role),
        content=stored.content,
        reasoning=stored.reasoning,
        tool_calls=tuple(ToolCall(id=id_, name=name, arguments=text) for id_, name, text in stored.calls),
        tool_call_id=stored.tool_call_id,
        joined=stored.joined,
        turn_id=stored.turn_id,
    )


def message_key(message: Message) -> bytes:
    """Hash of a message as it was sent. What a tool message answers is left out: its tokens don't depend on it."""
    sent = (message.role, message.content, message.reasoning, _calls(message), message.joined, message.turn_id)
    return xxhash.xxh3_128_digest(encode(sent))


def root_key(system: Message | None, tools: tuple[Tool, ...]) -> bytes:
    """Hash of what opens a conversation: the system text and the tools in their order."""
    listed = [(tool.name, tool.description, tool.parameters) for tool in tools]
    return xxhash.xxh3_128_digest(encode((None if system is None else system.content, listed)))


def _calls(message: Message) -> list[tuple[str, str, str]]:
    return [(call.id, call.name, call.arguments) for call in message.tool_calls]
