"""The dialect-neutral request and answer: what every dialect translates to and from.

It knows neither HTTP nor token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from infra.chat.messages import Message, Tool
from proxy.conversation.turn_notes import message_key, root_key


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


@dataclass(frozen=True)
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
    include_usage: bool
    """Chat Completions streams only: whether the usage is wanted."""
    asked: dict[str, Any]
    """Fields that were understood but not honoured (the run decides sampling) or ignored: recorded."""
    hints: Hints
    begun: Message | None
    """What the harness got of this request's turn before its connection broke, where it says so: the turn's rest is
    wanted. No part of ``digest``."""
    root: bytes
    """Key of ``system`` and ``tools``."""
    keys: tuple[bytes, ...]
    """Key of each message."""
    digest: bytes
    """Hash of the request except ``stream``, ``include_usage``, ``hints`` and ``begun``."""


def make_request(
    *,
    model: str,
    system: Message | None,
    messages: tuple[Message, ...],
    tools: tuple[Tool, ...],
    max_tokens: int | None,
    stream: bool,
    asked: dict[str, Any],
    include_usage: bool = False,
    hints: Hints | None = None,
    begun: Message | None = None,
) -> ModelRequest:
    """A request with its keys."""
    root = root_key(system, tools)
    keys = tuple(message_key(message) for message in messages)
    digest = xxhash.xxh3_128(root)
    digest.update(b"".join(keys))
    digest.update(orjson.dumps([max_tokens, asked], option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))
    return ModelRequest(
        model=model,
        system=system,
        messages=messages,
        tools=tools,
        max_tokens=max_tokens,
        stream=stream,
        include_usage=include_usage,
        asked=asked,
        hints=hints or Hints(),
        begun=begun,
        root=root,
        keys=keys,
        digest=digest.digest(),
    )


@dataclass(frozen=True)
class Opening:
    """What is known of a call before its turn is: enough to open a stream."""

    turn_id: str
    """Reference that the proxy minted: 24 URL-safe characters, unguessable. Dialects make their ids of it."""
    created: int
    """Unix time in seconds."""
    prompt_tokens: int


@dataclass(frozen=True)
class Turn:
    """A finished, durable turn: what goes back to the harness."""

    opening: Opening
    message: Message
    """Its ``turn_id`` is the opening's, and its tool calls have minted ids."""
    finish_reason: str
    """``stop``, ``length`` (the turn's limit) or ``context`` (the context's)."""
    output_tokens: int
    cached_tokens: int
    """Prompt tokens that the engine found in its cache."""


def attempt_name(request: ModelRequest) -> bytes:
    """Under which a call is found when its request is sent again: the agent, as the harness names it, and the body."""
    return request.hints.agent.encode("utf-8", "replace") + b"\0" + request.digest
