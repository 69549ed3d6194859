"""Counts of a step's episodes in Redis: what the scheduler's policies look at. What is counted is also clocked.

Sets of names rather than counters, so that an activity that runs twice counts once. Of an episode the first start
counts: an attempt that adopts a harness goes on with its clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from redis.asyncio import Redis

from infra.state import keys

KEEP_S = 14 * 24 * 3600
"""Seconds for which a closed step's counts and clocks are kept."""


@dataclass(frozen=True)
class Demand:
    total: int
    running: int
    ended: int

    @property
    def queued(self) -> int:
        """Episodes that have not started."""
        return max(0, self.total - self.running - self.ended)

    @property
    def unfinished(self) -> int:
        """Queued and running episodes."""
        return max(0, self.total - self.ended)


async def open_step(redis: Redis, run: str, step: int, total: int) -> None:
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hset(keys.step_demand(run, step), "total", str(total))
        pipe.sadd(keys.open_steps(run), step)
        await pipe.execute()


async def episode_started(redis: Redis, run: str, step: int, episode: str, at: float | None = None) -> None:
    """``at``: Unix seconds; now if None."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hsetnx(keys.step_started(run, step), episode, repr(time.time() if at is None else at))
        pipe.sadd(keys.step_running(run, step), episode)
        await pipe.execute()


async def episode_ended(redis: Redis, run: str, step: int, episode: str) -> None:
    async with redis.pipeline(transaction=True) as pipe:
        pipe.srem(keys.step_running(run, step), episode)
        pipe.sadd(keys.step_ended(run, step), episode)
        await pipe.execute()


async def demand_of(redis: Redis, run: str, step: int) -> Demand:
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hget(keys.step_demand(run, step), "total")
        pipe.scard(keys.step_running(run, step))
        pipe.scard(keys.step_ended(run, step))
        total, running, ended = await pipe.execute()
    return Demand(int(total or 0), int(running), int(ended))


async def running_episodes(redis: Redis, run: str) -> int:
    """Episodes that run now, of every open step of a run."""
    steps = [int(step) for step in await redis.smembers(keys.open_steps(run))]
    return sum([(await demand_of(redis, run, step)).running for step in steps])


async def older_queued(redis: Redis, run: str, step: int) -> int:
    """Episodes that have not started, of the run's open steps before ``step``."""
    older = [int(other) for other in await redis.smembers(keys.open_steps(run)) if int(other) < step]
    return sum([(await demand_of(redis, run, other)).queued for other in older])


async def close_step(redis: Redis, run: str, step: int) -> None:
    async with redis.pipeline(transaction=True) as pipe:
        pipe.srem(keys.open_steps(run), step)
        for name in keys.OF_STEP:
            pipe.expire(name(run, step), KEEP_S)
        await pipe.execute()
