"""Calls that a dead proxy left open: aborted at their engine and dropped, so that nothing runs or is held for nobody.

An open record counts as an orphan when the lease of the proxy that wrote it is gone. The harness asks again, and
what was sampled but never recorded is sampled again; how many tokens that were died with the proxy, so each counts
as at least one token resampled.
"""

from __future__ import annotations

import asyncio
import logging
import time

from redis.asyncio import Redis

from infra import keys
from infra.sglang.errors import EngineError
from proxy.episodes import Episode
from proxy.limits import Limits
from proxy.recorder import OpenCall, Recorder
from proxy.router import Router

log = logging.getLogger(__name__)


class Orphans:
    def __init__(self, redis: Redis, recorder: Recorder, router: Router, limits: Limits) -> None:
        self._redis, self._recorder, self._router, self._limits = redis, recorder, router, limits
        self._tasks: set[asyncio.Task[None]] = set()

    async def sweep(self, episode: Episode) -> None:
        """Look for orphans of an episode that was just loaded; a proxy whose lease still runs is watched."""
        episode.swept = True
        foreign = {
            rid: call
            for rid, call in (await self._recorder.opened(episode.name)).items()
            if call.proxy != self._router.proxy_id
        }
        if foreign and (alive := await self._reap(episode, foreign)):
            task = asyncio.get_running_loop().create_task(self._watch(episode, alive))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, episode: Episode, calls: dict[str, OpenCall]) -> None:
        deadline = time.monotonic() + 2 * self._limits.lease_s
        while calls and time.monotonic() < deadline:  # a proxy that renews its lease for so long is alive
            await asyncio.sleep(self._limits.lease_s / 5)
            still = await self._recorder.opened(episode.name)
            calls = await self._reap(episode, {rid: call for rid, call in calls.items() if rid in still})

    async def _reap(self, episode: Episode, calls: dict[str, OpenCall]) -> dict[str, OpenCall]:
        """Abort and drop the calls of dead proxies; returns those of living ones."""
        proxies = {call.proxy for call in calls.values()}
        alive = {proxy for proxy in proxies if await self._redis.exists(keys.proxy_lease(proxy))}
        for rid, call in calls.items():
            if call.proxy in alive:
                continue
            log.warning("call %s of %s was left by proxy %s", rid, episode.name, call.proxy)
            episode.lost[bytes.fromhex(call.digest)] += 1
            await self._recorder.drop(episode.name, rid)
            engine = self._router.engine_of(call.cell)
            if engine is not None:
                try:
                    await engine.abort(call.engine_rid)
                except EngineError as fault:
                    log.warning("orphan %s at %s: %s", rid, call.cell, fault)
        return {rid: call for rid, call in calls.items() if call.proxy in alive}
