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
from infra.state.redis import redis_client
from workers.errors import UsageError
from workers.why.activity_waits import activity_wait, task_waits
from workers.why.episode_state import SharedState, read_shared
from workers.why.episode_waits import Surroundings
from workers.why.temporal import Described, Pending, QueueWorkers, Result, Temporal, Unanswered, reach
from workers.why.wait import Answer, Wait
from workflows import names
from workflows.contracts.orders import Desired
from workflows.scheduler import SchedulerState

REDIS_S: Final = 5.0
PROXY_S: Final = 3.0


@dataclass(frozen=True)
class Snapshot:
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
    shared: SharedState
    proxy: dict[str, Any]
    """What the proxy says of itself; empty when it doesn't answer at its address."""
    control: QueueWorkers
    """Who runs the workflows' code."""
    queues: dict[str, QueueWorkers] = field(default_factory=dict)

    @property
    def pool(self) -> str:
        return self.scheduler.pool if self.scheduler is not None else self.settings.pool

    async def learn_queues(self, *workflows: Described) -> None:
        """Find out who works on the task queues of these workflows' activities."""
        queues = {activity.queue for described in workflows for activity in described.activities}
        new = sorted(queues - self.queues.keys())
        for workers in await asyncio.gather(*(self.temporal.workers(queue) for queue in new)):
            self.queues[workers.queue] = workers

    async def ask(
        self, answer: Answer, workflow: str, query: str, kind: type[Result], about: str = "state"
    ) -> Result | None:
        """What a workflow says of itself. Where no worker answers for it: None, and the answer has it as a fact."""
        if self.silence:
            return None
        try:
            return await self.temporal.ask(workflow, query, kind)
        except Unanswered as error:
            answer.facts.append(f"its {about} is not known: {error}")
            return None

    async def ended_fact(self, described: Described) -> str:
        """How and when a workflow ended, and why it failed."""
        at = f" at {described.closed:%Y-%m-%d %H:%M:%S} UTC" if described.closed is not None else ""
        why = await self.temporal.closing(described.id)
        return f"{described.status}{at}" + (f": {why}" if why else "")

    def task_waits(self, what: str, described: Described) -> list[Wait]:
        return task_waits(what, described.id, described.task, self.control, self.now)

    def activity_wait(self, what: str, pending: Pending, kind: str = "") -> Wait:
        return activity_wait(what, pending, self.queues, self.now, kind)

    def around(self, run: str) -> Surroundings:
        """Of the episodes of a run."""
        budget = run_config(self.blobs, run).get("budget", {})
        desired = self.scheduler.desired if self.scheduler is not None else {}
        return Surroundings(
            now=self.now,
            shared=self.shared,
            queues=self.queues,
            roles={cell: role_words(state) for cell, state in desired.items()},
            hold_s=self.proxy.get("hold_s"),
            budget_s=budget.get("active_s"),
            wall_s=budget.get("wall_s"),
        )

    @property
    def faults(self) -> list[Wait]:
        """What keeps everything waiting."""
        again = "(`gyre up` starts it; the stack starts a dead one again)"
        faults = []
        if self.silence:
            owner, ends = f"the workers of {names.CONTROL_QUEUE}", f"a worker of that queue answers {again}"
            faults.append(Wait("every workflow", owner, self.silence, ends=ends))
        if self.shared.fault:
            what, owner = "every call, start and end of an episode", f"Redis at {self.settings.redis}"
            faults.append(Wait(what, owner, self.shared.fault, ends=f"Redis answers {again}"))
        elif not self.shared.proxies:
            reason = "no proxy lives: none holds its lease in Redis"
            faults.append(Wait("every call", "the proxy", reason, ends=f"a proxy is there {again}"))
        return faults


@asynccontextmanager
async def take_snapshot(settings: Settings) -> AsyncIterator[Snapshot]:
    """Raises UsageError and TemporalUnreachable when there is no stack."""
    temporal = await reach(settings)
    async with redis_client(settings.redis, socket_timeout=REDIS_S, socket_connect_timeout=REDIS_S) as redis:
        yield await _read(settings, temporal, redis)


async def _read(settings: Settings, temporal: Temporal, redis: Redis) -> Snapshot:
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
    return Snapshot(
        settings=settings,
        temporal=temporal,
        redis=redis,
        blobs=BlobStore(settings.blobs),
        now=datetime.now(UTC),
        scheduler=state,
        silence=silence,
        described=described,
        shared=shared,
        proxy=proxy,
        control=control,
    )


async def _ask_proxy(settings: Settings) -> dict[str, Any]:
    url = f"http://{settings.host}:{settings.proxy_port}/healthz"
    timeout = aiohttp.ClientTimeout(total=PROXY_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            health: dict[str, Any] = orjson.loads(await answer.read())
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return {}
    return health


def run_config(blobs: BlobStore, run: str) -> dict[str, Any]:
    """As it was submitted; empty before it was checked."""
    try:
        config: dict[str, Any] = orjson.loads(blobs.get_named(config_name(run)))
    except BlobMissing:
        return {}
    return config


def role_words(desired: Desired) -> str:
    if desired.role == "idle":
        return f"is idle ({desired.reason})" if desired.reason else "is idle"
    if desired.role == "rollout":
        return f"serves version {desired.version}"
    return f"trains step {desired.step}" + (" as its core" if desired.core else "")
