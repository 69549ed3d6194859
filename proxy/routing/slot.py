"""A slot: the right to send one request to a cell, from when it is asked for until it is released."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from infra.state.keys import Route
from proxy.routing.admission import Window
from proxy.routing.engine import Engine


@dataclass(eq=False)
class Slot:
    """``route``, ``engine`` and ``window`` are there once it is granted."""

    rid: str
    """Request id at the engine."""
    episode: str
    min_version: int
    max_version: int
    near: str = ""
    """The cell that has the prompt's prefix, "" for none."""
    tokens: int = 1
    """Of the prompt: what the request takes of the window while it has the slot."""
    seniority: int = 0
    """Calls that the episode has made."""
    since: float = field(default_factory=time.monotonic)
    """Monotonic time at which the call came; kept when it moves to another cell."""

    route: Route = field(init=False, repr=False)
    engine: Engine = field(init=False, repr=False)
    window: Window = field(init=False, repr=False)
    revoked_at: float | None = field(default=None, init=False)
    """Monotonic time from which the request is aborted, because its route has closed or changed."""
    request: asyncio.Future[Any] | None = field(default=None, init=False)
    """At the engine; cancelled when the engine does not end it after an abort."""
    over: asyncio.Event = field(default_factory=asyncio.Event, init=False)
