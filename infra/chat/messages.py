"""The one message model behind every API dialect: what a harness says and what a turn contains.

Dialects translate to and from it; the renderer turns it into tokens. A dialect's message of several blocks becomes
several messages here, the later ones ``joined``, so that a block appended later is a message more and never changes
one that is known. It knows neither HTTP nor token ids.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: str
    """JSON text."""


class Tool(msgspec.Struct, frozen=True):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON Schema of the arguments."""


class Message(msgspec.Struct, frozen=True):
    """One block of a conversation; of an assistant's turn all blocks together."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of a tool message: the call that it answers."""
    joined: bool = False
    """A system, user or tool block of the same turn as the message before it: no turn ends between the two. Never of
    an assistant message."""
    turn_id: str = ""
    """Of an assistant message: the reference that the proxy minted for the whole turn, where the dialect has a place
    that harnesses send back verbatim (a thinking signature, a reasoning item); "" where there was none."""
