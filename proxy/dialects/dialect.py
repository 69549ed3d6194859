"""What an API dialect is: a module of pure functions between bodies and the one message model.

A dialect knows neither the router nor the ledger nor tokens; ``proxy.app`` calls it, with nothing but bytes,
headers, requests and turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from proxy.conversation.requests import ModelRequest, Turn
from proxy.errors import GatewayError


@dataclass(frozen=True)
class Field:
    """How a dialect treats a request field. What is in no table is refused, as the providers do."""

    treatment: Literal["honoured", "ignored", "refused"]
    """``ignored``: recorded with the call, without effect. ``refused``: a 400 unless it is null, or ``taken``."""
    note: str
    """Why, or which values are taken; one line for people."""
    taken: tuple[Any, ...] = ()
    """Values of a refused field that change nothing, and are taken; null always is."""


def ignored(note: str, *names: str) -> dict[str, Field]:
    return dict.fromkeys(names, Field("ignored", note))


def refused(note: str, *names: str, taken: tuple[Any, ...] = ()) -> dict[str, Field]:
    return dict.fromkeys(names, Field("refused", note, taken))


class Dialect(Protocol):
    """A module of this shape: ``anthropic``, ``openai_chat`` and ``openai_responses``."""

    NAME: str
    PATHS: tuple[str, ...]
    FIELDS: Mapping[str, Field]
    PING: bytes
    """What a waiting stream is sent every few seconds."""

    def parse(self, body: bytes, headers: Mapping[bytes, bytes]) -> ModelRequest:
        """Read a request. ``headers`` has lower-case names. Raises BadRequest naming the field."""
        ...

    def response(self, request: ModelRequest, turn: Turn) -> bytes:
        """The body of an answer without streaming."""
        ...

    def stream_start(self, request: ModelRequest, turn: Turn) -> bytes:
        """The first bytes of a stream, sent once the call is admitted; then come PINGs until the turn is there."""
        ...

    def stream_turn(self, request: ModelRequest, turn: Turn) -> bytes:
        """All that follows ``stream_start``, to the end of the stream."""
        ...

    def stream_error(self, fault: GatewayError) -> bytes:
        """A refusal after the stream has begun."""
        ...

    def error(self, fault: GatewayError) -> bytes:
        """The body of a refusal; its HTTP status is the fault's."""
        ...
