"""A call that runs in another proxy process, asked for again here.

Invariant: a request whose connection to another proxy has closed is answered with that proxy's turn while that proxy
lives, so that a harness which asks again never gets a second sample, whichever process it reaches.

It knows no tokens and no engines.
"""

from __future__ import annotations

import asyncio
import time

from proxy.calls.episodes import Attempt, Episode, Episodes
from proxy.calls.recorder import LeftCall, Recorder
from proxy.limits import Limits

POLL_S = 0.2


class Foreign:
    def __init__(self, recorder: Recorder, episodes: Episodes, limits: Limits) -> None:
        self._recorder, self._episodes, self._limits = recorder, episodes, limits

    async def turn_of(self, episode: Episode, name: bytes, left: LeftCall) -> Attempt | None:
        """Wait for the recorded turn. None when the other proxy has given the call up, or is dead."""
        deadline = time.monotonic() + self._limits.hold_s
        while time.monotonic() < deadline:
            unfinished = await self._recorder.want(episode.name, name)
            await self._episodes.refresh(episode)
            if (attempt := episode.offered(name)) is not None:
                return attempt
            if not unfinished:
                return None
            if not await self._recorder.alive(left.proxy):
                await self._recorder.forget_left(episode.name, name)
                return None
            await asyncio.sleep(POLL_S)  # what is waited for is a field in Redis, which cannot be awaited
        return None
