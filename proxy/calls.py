"""The dialect-neutral request and answer: what every dialect translates to and from.

It knows neither HTTP nor token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infra.chat.messages import Message, Tool


@dataclass(frozen=True)
class ModelRequest:
    """One request of a harness, canonical: equal requests are equal here, however they were written."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    max_tokens: int | None
    """Sampled tokens at most, as the harness asks; the run's own bound still applies."""
    stream: bool
    include_usage: bool
    asked: dict[str, Any]
    """Fields that were understood but not honoured (the run decides sampling) or ignored: recorded."""
    digest: bytes
    """Hash of everything above except ``stream`` and ``include_usage``."""


@dataclass(frozen=True)
class Turn:
    """A finished, durable turn: what goes back to the harness."""

    response_id: str
    created: int
    """Unix time in seconds."""
    message: Message
    finish_reason: str
    """``stop``, ``length`` or ``context``."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens that the engine found in its cache."""
