"""The dialect-neutral request and answer: what every dialect translates to and from.

It knows neither HTTP nor token ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson
import xxhash

from infra.chat.messages import Message, Tool
from proxy.conversation.stored_turns import message_key, root_key


@dataclass(frozen=True)
class Hints:
    """What a harness says of a request's place in its episode, in headers or marks of the body.

    Hints never decide over what the conversation itself shows; they break ties, and a disagreement is logged.
    """

    agent: str = ""
    """The harness's own id of a sub-agent; "" for its main agent, or when it doesn't tell agents apart."""
    parent: str = ""
    """Of a nested sub-agent: the id of the agent that started it."""
    sub_agent: bool | None = None
    """Whether it is a sub-agent's call; None when the harness doesn't say."""
    summary: bool | None = None
    """Whether the call asks for the summary of a compaction; None when the harness doesn't say."""
    side: bool | None = None
    """Whether it is a title, a search and the like; None when the harness doesn't say."""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """One request of a harness, canonical: equal requests are equal here, however they were written."""

    model: str
    system: Message | None
    """What opens the conversation, beside the tools."""
    messages: tuple[Message, ...]
    """After ``system``; never empty, and the last is no assistant message."""
    tools: tuple[Tool, ...]
    max_tokens: int | None
    """Sampled tokens at most, as the harness asks; the run's own bound still applies."""
    stream: bool
    include_usage: bool = False
    """Chat Completions streams only: whether the usage is wanted."""
    asked: dict[str, Any] = field(default_factory=dict)
    """Fields that were understood but not honoured (the run decides sampling) or ignored: recorded."""
    hints: Hints = Hints()
    begun: Message | None = None
    """What the harness got of this request's turn before its connection broke, where it says so: the turn's rest is
    wanted. No part of ``digest``."""

    @cached_property
    def root(self) -> bytes:
        """Key of ``system`` and ``tools``."""
        return root_key(self.system, self.tools)

    @cached_property
    def keys(self) -> tuple[bytes, ...]:
        """Key of each message."""
        return tuple(message_key(message) for message in self.messages)

    @cached_property
    def digest(self) -> bytes:
        """Hash of the request except ``model``, ``stream``, ``include_usage``, ``hints`` and ``begun``."""
        digest = xxhash.xxh3_128(self.root)
        digest.update(b"".join(self.keys))
        digest.update(
            orjson.dumps([self.max_tokens, self.asked], option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
        )
        return digest.digest()

    @property
    def name(self) -> bytes:
        """Under which a call is found when its request is sent again: the agent, as the harness names it, and the
        body."""
        return self.hints.agent.encode("utf-8", "replace") + b"\0" + self.digest


_UNSAID = Message("assistant")


@dataclass(frozen=True)
class Turn:
    """A turn as it goes back to the harness. Its head is known before it is sampled: enough to open a stream."""

    turn_id: str
    """Reference that the proxy minted: 24 URL-safe characters, unguessable. Dialects make their ids of it."""
    created: int
    """Unix time in seconds."""
    prompt_tokens: int
    message: Message = _UNSAID
    """With the same ``turn_id``, and minted ids of its tool calls."""
    finish_reason: str = ""
    """``stop``, ``length`` (the turn's limit) or ``context`` (the context's); "" before the turn is there."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the engine found in its cache."""
