"""Heartbeats while something long is awaited.

An activity that awaits one long call (a harness, a training claim) must still say that it lives, and must hear when
it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from temporalio import activity


@contextlib.asynccontextmanager
async def beating(every_s: float = 3.0, detail: str = "") -> AsyncIterator[None]:
    """Heartbeat every ``every_s`` seconds until the block ends."""

    async def beat() -> None:
        while True:
            activity.heartbeat(detail)
            await asyncio.sleep(every_s)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
