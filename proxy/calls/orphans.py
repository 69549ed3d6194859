"""Calls that a dead proxy left open: aborted at their engine and dropped, so that nothing runs or is held for nobody.

An open record counts as an orphan when the lease of the proxy that wrote it is gone. The harness asks again, and
what was sampled but never recorded is sampled again; how many tokens that were died with the proxy, so each counts
as at least one token resampled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import redis.exceptions

from infra.sglang.errors import EngineError
from proxy.calls.episodes import Episode
from proxy.calls.recorder import OpenCall, Recorder
from proxy.errors import GatewayError
from proxy.limits import Limits
from proxy.routing.router import Router
from proxy.routing.tasks import Tasks
from trajectory.records import RecordError

log = logging.getLogger(__name__)


class Orphans:
    """``load`` gives an episode by its name, reading it from Redis where need be."""

    def __init__(
        self, recorder: Recorder, router: Router, limits: Limits, load: Callable[[str], Awaitable[Episode]]
    ) -> None:
        self._recorder, self._router, self._limits, self._load = recorder, router, limits, load
        self._tasks = Tasks()

    async def sweep(self, episode: Episode) -> None:
        """Look for orphans of an episode that was just loaded; a proxy whose lease still runs is watched."""
        episode.swept = True
        others = await self._of_others(episode)
        if others and (alive := await self._reap(episode, others)):
            self._tasks.start(self._watch(episode, alive))

    def peer_gone(self, proxy: str) -> None:
        """A proxy is dead: end its calls, whether or not their harnesses ever ask again."""
        self._tasks.start(self._sweep_peer(proxy))

    async def _sweep_peer(self, proxy: str) -> None:
        try:
            for name in set((await self._recorder.calls_of(proxy)).values()):
                await self.sweep(await self._load(name))
            await self._recorder.forget_proxy(proxy)
        except (redis.exceptions.RedisError, GatewayError, RecordError) as fault:
            log.warning("calls of the dead proxy %s are left: %s", proxy, fault)  # swept when their episodes are loaded

    async def stop(self) -> None:
        await self._tasks.end()

    async def _of_others(self, episode: Episode) -> dict[str, OpenCall]:
        """Unfinished calls of other proxies, those included that were held and never reached an engine."""
        calls = await self._recorder.opened(episode.name)
        for rid in await self._recorder.held_calls(episode.name):
            calls.setdefault(rid, OpenCall(rid.rpartition(".")[0], "", rid, "", 0.0))
        return {rid: call for rid, call in calls.items() if call.proxy != self._router.proxy_id}

    async def _watch(self, episode: Episode, calls: dict[str, OpenCall]) -> None:
        deadline = time.monotonic() + 2 * self._limits.lease_s
        while calls and time.monotonic() < deadline:  # a proxy that renews its lease for so long is alive
            await asyncio.sleep(self._limits.lease_s / 5)
            still = await self._of_others(episode)
            calls = await self._reap(episode, {rid: call for rid, call in calls.items() if rid in still})

    async def _reap(self, episode: Episode, calls: dict[str, OpenCall]) -> dict[str, OpenCall]:
        """Abort and drop the calls of dead proxies; returns those of living ones."""
        proxies = {call.proxy for call in calls.values()}
        alive = {proxy for proxy in proxies if await self._recorder.alive(proxy)}
        for rid, call in calls.items():
            if call.proxy in alive:
                continue
            log.warning("call %s of %s was left by proxy %s", rid, episode.name, call.proxy)
            await self._recorder.reap(episode.name, rid)
            if not call.cell:
                continue
            episode.lost[bytes.fromhex(call.digest)] += 1
            engine = self._router.engine_of(call.cell)
            if engine is not None:
                try:
                    await engine.abort(call.engine_rid)
                except EngineError as fault:
                    log.warning("orphan %s at %s: %s", rid, call.cell, fault)
        return {rid: call for rid, call in calls.items() if call.proxy in alive}
