"""Turn notes: the messages behind a call record, kept beside it so that the ledger can be rebuilt.

A note is a delta like its record: it names how many nodes of the parent call's path it shares, and lists the nodes
that the call added with the token position at which each ends. The tokens themselves are in the record.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
import xxhash

from infra.chat.messages import Message, Role, Tool, ToolCall


class MessageNote(msgspec.Struct, frozen=True, array_like=True):
    role: str
    content: str
    reasoning: str
    calls: list[tuple[str, str, str]]
    """(id, name, arguments) of each tool call."""
    tool_call_id: str
    joined: bool = False
    turn_id: str = ""


class NodeNote(msgspec.Struct, frozen=True, array_like=True):
    end: int
    """Tokens from the start of the conversation to the end of this node."""
    message: MessageNote | None
    """None: the root block, named by ``root``."""
    root: bytes
    synthetic: bool
    rewritten: bool
    closed: bool
    said: int = -1
    partial: bool = False


class TurnNote(msgspec.Struct, frozen=True, array_like=True):
    rid: str
    name: bytes
    """Of the request, by which it is recognised when it is sent again (``calls.attempt_name``)."""
    turn_id: str
    cached_tokens: int
    depth: int
    """Nodes shared with the path of the record's parent."""
    nodes: list[NodeNote]
    message: MessageNote
    """The turn as it was delivered, with the minted ids."""
    asked: dict[str, Any]
    """What the harness asked for and the run decided otherwise, or ignored."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TurnNote)


def encode(note: TurnNote) -> bytes:
    return _encoder.encode(note)


def decode(data: bytes) -> TurnNote:
    return _decoder.decode(data)


def note_of(message: Message) -> MessageNote:
    return MessageNote(
        message.role,
        message.content,
        message.reasoning,
        [(call.id, call.name, call.arguments) for call in message.tool_calls],
        message.tool_call_id,
        message.joined,
        message.turn_id,
    )


def message_of(note: MessageNote) -> Message:
    return Message(
        role=cast(Role, note.role),
        content=note.content,
        reasoning=note.reasoning,
        tool_calls=tuple(ToolCall(id=id_, name=name, arguments=text) for id_, name, text in note.calls),
        tool_call_id=note.tool_call_id,
        joined=note.joined,
        turn_id=note.turn_id,
    )


def message_key(message: Message) -> bytes:
    """Hash of a message as it was sent. What a tool message answers is left out: its tokens don't depend on it."""
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    said = (message.role, message.content, message.reasoning, calls, message.joined, message.turn_id)
    return xxhash.xxh3_128_digest(_encoder.encode(said))


def root_key(system: Message | None, tools: tuple[Tool, ...]) -> bytes:
    """Hash of what opens a conversation: the system text and the tools in their order."""
    listed = [(tool.name, tool.description, tool.parameters) for tool in tools]
    return xxhash.xxh3_128_digest(_encoder.encode((None if system is None else system.content, listed)))
