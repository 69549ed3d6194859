"""Which other proxies live, and who of them has died. One that died is taken out of the shared state.

A proxy is alive while its lease is: each renews its own. Every proxy that knew a peer learns once that it is gone,
whoever removed it, and again if it comes back (a process that had stood still) and goes once more.

It knows nothing of what a peer was doing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from redis.asyncio import Redis

from infra.state import keys

log = logging.getLogger(__name__)

_REMOVE = """
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
return redis.call('SREM', KEYS[1], ARGV[1])
"""
"""In one step, so that a peer that renews its lease at this moment stays a member."""


class Peers:
    """The peers of the proxy ``proxy_id``."""

    def __init__(self, redis: Redis, proxy_id: str) -> None:
        self._redis, self._own = redis, proxy_id
        self._known: set[str] = set()

    @property
    def alive(self) -> int:
        """Other proxies that were alive at the last look."""
        return len(self._known)

    async def look(self, members: Iterable[str]) -> list[str]:
        """The ids of those that have died or stopped since the last look. ``members``: the ids in ``keys.PROXIES``."""
        others = sorted(set(members) - {self._own})
        alive: set[str] = set()
        if others:
            pipeline = self._redis.pipeline(transaction=False)
            for peer in others:
                pipeline.exists(keys.proxy_lease(peer))
            alive = {peer for peer, lives in zip(others, await pipeline.execute(), strict=True) if lives}
        dead = set(others) - alive
        for peer in sorted(dead):
            await self._redis.eval(_REMOVE, 2, keys.PROXIES, keys.proxy_lease(peer), peer)
        gone = sorted(dead | (self._known - alive))
        self._known = alive
        if gone:
            log.info("gone: proxies %s", ", ".join(gone))
        return gone
