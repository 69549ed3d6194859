"""Everything that the parts of `gyre why` read from, opened once, and what they read of the whole pool.

Reads only. What can't be read (no worker answers, Redis is away, the proxy is silent) is itself told as a wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
import orjson
from redis.asyncio import Redis

from infra.settings import Settings
from infra.state.blobs import BlobMissing, BlobStore
from infra.state.record_names import config_name
from workers.errors import UsageError
from workers.why.episodes import Surroundings
from workers.why.spoken import Shared, read_shared
from workers.why.temporal import Described, QueueWorkers, Temporal, Unanswered, reach
from workers.why.wait import Wait
from workflows import names
from workflows.contracts.orders import Desired
from workflows.scheduler import SchedulerState

REDIS_S: Final = 5.0
PROXY_S: Final = 3.0


@dataclass(frozen=True)
class Sight:
    settings: Settings
    temporal: Temporal
    redis: Redis
    blobs: BlobStore
    now: datetime
    scheduler: SchedulerState | None
    """None when no worker answers for it: ``silence`` says why."""
    silence: str
    described: Described
    """The scheduler's workflow."""
    shared: Shared
    proxy: dict[str, Any] | None
    """What the proxy says of itself; None when it doesn't answer at its address."""
    queues: dict[str, QueueWorkers]
    control: QueueWorkers
    """Who runs the workflows' code."""
    faults: list[Wait] = field(default_factory=list)
    """What keeps everything waiting."""

    async def learn_queues(self, queues: set[str]) -> None:
        """Find out who works on these task queues."""
        new = sorted(queues - self.queues.keys())
        for workers in await asyncio.gather(*(self.temporal.workers(queue) for queue in new)):
            self.queues[workers.queue] = workers

    def around(self, config: dict[str, Any]) -> Surroundings:
        """``config``: of the run, as `run_config` reads it."""
        budget = config.get("budget", {})
        desired = self.scheduler.desired if self.scheduler is not None else {}
        return Surroundings(
            now=self.now,
            shared=self.shared,
            queues=self.queues,
            roles={cell: role_words(state) for cell, state in desired.items()},
            hold_s=self.proxy.get("hold_s") if self.proxy is not None else None,
            budget_s=budget.get("active_s"),
            wall_s=budget.get("wall_s"),
        )

    def run_config(self, run: str) -> dict[str, Any]:
        """As it was submitted; empty before it was checked."""
        try:
            found: dict[str, Any] = orjson.loads(self.blobs.get_named(config_name(run)))
        except BlobMissing:
            return {}
        return found


@asynccontextmanager
async def look(settings: Settings) -> AsyncIterator[Sight]:
    """Raises UsageError and TemporalUnreachable when there is no stack."""
    temporal = await reach(settings)
    redis = Redis.from_url(settings.redis, socket_timeout=REDIS_S, socket_connect_timeout=REDIS_S)
    try:
        yield await _look(settings, temporal, redis)
    finally:
        await redis.aclose()


async def _look(settings: Settings, temporal: Temporal, redis: Redis) -> Sight:
    scheduler = names.scheduler_id(settings.pool)
    described, shared, proxy, control = await asyncio.gather(
        temporal.describe(scheduler),
        read_shared(redis),
        _ask_proxy(settings),
        temporal.workers(names.CONTROL_QUEUE, workflows=True),
    )
    if described is None:
        raise UsageError(f"pool {settings.pool} has no scheduler: `gyre up` starts it")
    state, silence = None, ""
    try:
        state = await temporal.ask(scheduler, "status", SchedulerState)
    except Unanswered as error:
        silence = f"{error}: {control.words}"
    now = datetime.now(UTC)
    sight = Sight(
        settings=settings,
        temporal=temporal,
        redis=redis,
        blobs=BlobStore(settings.blobs),
        now=now,
        scheduler=state,
        silence=silence,
        described=described,
        shared=shared,
        proxy=proxy,
        queues={},
        control=control,
    )
    sight.faults.extend(_faults(sight))
    return sight


async def _ask_proxy(settings: Settings) -> dict[str, Any] | None:
    url = f"http://{settings.host}:{settings.proxy_port}/healthz"
    timeout = aiohttp.ClientTimeout(total=PROXY_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            found: dict[str, Any] = orjson.loads(await answer.read())
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
    return found


def _faults(sight: Sight) -> list[Wait]:
    found = []
    if sight.silence:
        found.append(
            Wait(
                what="every workflow",
                owner=f"the workers of {names.CONTROL_QUEUE}",
                reason=sight.silence,
                ends="a worker of that queue answers (`gyre up` starts it; the stack starts a dead one again)",
            )
        )
    if sight.shared.fault:
        found.append(
            Wait(
                what="every call, start and end of an episode",
                owner=f"Redis at {sight.settings.redis}",
                reason=sight.shared.fault,
                ends="Redis answers (`gyre up` starts it; the stack starts a dead one again)",
            )
        )
    elif not sight.shared.proxies:
        found.append(
            Wait(
                what="every call",
                owner="the proxy",
                reason="no proxy lives: none holds its lease in Redis",
                ends="a proxy is there (`gyre up` starts it; the stack starts a dead one again)",
            )
        )
    return found


def role_words(desired: Desired) -> str:
    if desired.role == "idle":
        return f"is idle ({desired.reason})" if desired.reason else "is idle"
    if desired.role == "rollout":
        return f"serves version {desired.version}"
    return f"trains step {desired.step}" + (" as its core" if desired.core else "")
