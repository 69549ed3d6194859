"""The watermark's counts: an activity that runs twice counts once."""

from __future__ import annotations

from redis.asyncio import Redis

from infra.state import demand, durations, keys


async def test_repeated_starts_and_ends_count_once(redis: Redis) -> None:
    await demand.open_step(redis, "r", 0, 3)
    for _ in range(2):
        await demand.episode_started(redis, "r", 0, "a")
    assert await demand.demand_of(redis, "r", 0) == demand.Demand(total=3, running=1, ended=0)
    for _ in range(2):
        await demand.episode_ended(redis, "r", 0, "a")
    counted = await demand.demand_of(redis, "r", 0)
    assert (counted.unfinished, counted.running) == (2, 0)


async def test_a_later_step_waits_for_the_starts_of_the_ones_before_and_not_for_their_ends(redis: Redis) -> None:
    await demand.open_step(redis, "r", 3, 2)
    await demand.open_step(redis, "r", 4, 2)
    assert await demand.older_queued(redis, "r", 4) == 2
    assert await demand.older_queued(redis, "r", 3) == 0
    await demand.episode_started(redis, "r", 3, "a")
    await demand.episode_started(redis, "r", 3, "b")
    assert await demand.older_queued(redis, "r", 4) == 0
    assert await demand.running_episodes(redis, "r") == 2
    await demand.close_step(redis, "r", 3)
    assert await demand.running_episodes(redis, "r") == 0


async def test_a_step_that_is_not_known_has_no_total(redis: Redis) -> None:
    assert (await demand.demand_of(redis, "r", 7)).total == 0


async def test_a_closed_step_is_forgotten_after_a_while_its_clocks_with_its_counts(redis: Redis) -> None:
    plan = durations.StepPlan(tasks=["set#0"], group_size=1, limit_s=10)
    await durations.plan_step(redis, "r", 0, plan)
    await demand.open_step(redis, "r", 0, 1)
    for at in (100.0, 200.0):
        await demand.episode_started(redis, "r", 0, "a", at)
    assert (await durations.step_clocks(redis, "r", 0)).started == {"a": 100.0}
    await durations.episode_took(redis, "r", 0, "a", 5.0)
    await demand.episode_started(redis, "r", 0, "b")
    await demand.episode_ended(redis, "r", 0, "a")
    await demand.close_step(redis, "r", 0)
    lifetimes = [await redis.ttl(name("r", 0)) for name in keys.OF_STEP]
    assert len(lifetimes) == 5 and all(0 < seconds <= demand.KEEP_S for seconds in lifetimes)
