"""How long a step's episodes have run and took, in Redis: what forecasts of its tail are made from.

Hashes by episode, so that an activity that runs twice writes the same. `infra.state.demand` counts, and writes when
episodes start. It knows nothing of forecasts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel
from redis.asyncio import Redis

from infra.state import keys
from infra.state.redis import text


class StepPlan(BaseModel):
    """What a step consists of."""

    tasks: list[str] = []
    """Name of each group's task; empty for an evaluation."""
    group_size: int = 0
    limit_s: float = 0.0
    """Active seconds after which an episode's budget is spent."""


@dataclass(frozen=True)
class StepClocks:
    """Of one step. Episodes go by their names (`run/step/group/index`)."""

    plan: StepPlan = field(default_factory=StepPlan)
    """Empty when the step was never planned here."""
    started: dict[str, float] = field(default_factory=dict)
    """Unix seconds at which each running or ended episode started."""
    active_s: dict[str, float] = field(default_factory=dict)
    """Of those that have ended, as far as they ran at all."""
    ended: frozenset[str] = frozenset()


async def plan_step(redis: Redis, run: str, step: int, plan: StepPlan) -> None:
    await redis.hset(keys.step_demand(run, step), "plan", plan.model_dump_json())


async def episode_took(redis: Redis, run: str, step: int, episode: str, active_s: float) -> None:
    await redis.hset(keys.step_durations(run, step), episode, repr(active_s))


async def step_clocks(redis: Redis, run: str, step: int) -> StepClocks:
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hget(keys.step_demand(run, step), "plan")
        pipe.hgetall(keys.step_started(run, step))
        pipe.hgetall(keys.step_durations(run, step))
        pipe.smembers(keys.step_ended(run, step))
        plan, started, took, ended = await pipe.execute()
    return StepClocks(
        plan=StepPlan.model_validate_json(plan) if plan else StepPlan(),
        started={text(name): float(value) for name, value in started.items()},
        active_s={text(name): float(value) for name, value in took.items()},
        ended=frozenset(text(name) for name in ended),
    )


async def held_s(redis: Redis, episodes: list[str]) -> list[float]:
    """Seconds for which the proxy held the finished calls of each."""
    if not episodes:
        return []
    return [float(value or 0) for value in await redis.mget([keys.held(episode) for episode in episodes])]
