"""What the scheduler expects of a run's steps is made from what Redis holds, and from nothing a restart could lose."""

from __future__ import annotations

import time

import pytest
from redis.asyncio import Redis

from activities.forecasting import Forecasts
from infra.state import demand, durations
from workflows.contracts.configuration import SchedulerConfig
from workflows.names import episode_name
from workflows.scheduling.pool_view import CellView, PoolView, StepView

TASKS = ["set#0", "set#1", "set#2"]


async def opened(redis: Redis, step: int, tasks: list[str] = TASKS) -> None:
    plan = durations.StepPlan(tasks=tasks, group_size=2, limit_s=1000)
    await durations.plan_step(redis, "r", step, plan)
    await demand.open_step(redis, "r", step, 2 * len(TASKS))


async def started(redis: Redis, step: int, group: int, index: int, ago_s: float) -> None:
    episode = episode_name("r", step, group, index)
    await demand.episode_started(redis, "r", step, episode, time.time() - ago_s)


async def ended(redis: Redis, step: int, group: int, index: int, active_s: float) -> None:
    episode = episode_name("r", step, group, index)
    await durations.episode_took(redis, "r", step, episode, active_s)
    await demand.episode_ended(redis, "r", step, episode)


async def whole_step(redis: Redis, step: int, seconds: list[float], tasks: list[str] = TASKS) -> None:
    await opened(redis, step, tasks)
    for group, active_s in enumerate(seconds):
        for index in range(2):
            await started(redis, step, group, index, active_s)
            await ended(redis, step, group, index, active_s)


def view(step: int, unfinished: int) -> PoolView:
    return PoolView(
        run="r",
        cells=[CellView(cell="a"), CellView(cell="b")],
        steps=[StepView(step=step, train=True, unfinished=unfinished, total=6, ready=0)],
        capacity=48,
        scheduler=SchedulerConfig(),
        rollout_tokens_per_s=10.0,
    )


async def test_groups_of_tasks_that_took_long_start_first(redis: Redis) -> None:
    forecasts = Forecasts(redis)
    assert await forecasts.start_order("r", 0, TASKS) == [0, 1, 2]
    await whole_step(redis, 0, [20, 200, 60])
    assert await forecasts.start_order("r", 1, ["set#2", "set#0", "set#1"]) == [2, 0, 1]


async def test_evaluations_teach_nothing_about_training_tasks(redis: Redis) -> None:
    await whole_step(redis, 0, [500, 1, 1], tasks=[])
    assert await Forecasts(redis).start_order("r", 1, TASKS) == [0, 1, 2]


async def test_a_tail_is_expected_from_siblings_and_counts_what_has_run_already(redis: Redis) -> None:
    forecasts = Forecasts(redis)
    await whole_step(redis, 0, [100, 100, 100])
    await opened(redis, 1)
    for group in range(3):
        await started(redis, 1, group, 0, 100)
        await ended(redis, 1, group, 0, 100)
    await started(redis, 1, 0, 1, 10)
    await started(redis, 1, 1, 1, 10)
    young = (await forecasts.with_outlooks(view(1, 3))).steps[0].outlook
    assert young is not None
    assert len(young.due) == 3
    old = Forecasts(redis)
    await redis.delete("gyre:step:r:1:started")  # the same two, a minute later
    await started(redis, 1, 0, 1, 70)
    await started(redis, 1, 1, 1, 70)
    later = (await old.with_outlooks(view(1, 3))).steps[0].outlook
    assert later is not None
    assert max(later.latest_s[:2]) == pytest.approx(max(young.latest_s[:2]) - 60, abs=5)
    assert later.due[0][0] < young.due[0][0]
    # Tokens: two episodes of about 100 active seconds each, at 10 tokens a second.
    assert young.due[0][1] == pytest.approx(2000, rel=0.3)


async def test_seconds_for_which_calls_were_held_do_not_count_as_run(redis: Redis) -> None:
    await whole_step(redis, 0, [100, 100, 100])
    await opened(redis, 1)
    for group in range(3):
        for index in range(2):
            await started(redis, 1, group, index, 90)
    free = (await Forecasts(redis).with_outlooks(view(1, 6))).steps[0].outlook
    for group in range(3):
        for index in range(2):
            await redis.set(f"gyre:ep:{episode_name('r', 1, group, index)}:held", "80")
    held = (await Forecasts(redis).with_outlooks(view(1, 6))).steps[0].outlook
    assert free is not None
    assert held is not None
    assert min(held.latest_s) == pytest.approx(min(free.latest_s) + 80, abs=5)
    assert held.tail_s > free.tail_s


async def test_a_worker_that_starts_anew_expects_the_same(redis: Redis) -> None:
    lasting = Forecasts(redis)
    for step in range(3):
        await lasting.start_order("r", step, TASKS)
        await whole_step(redis, step, [30 * (step + 1), 80, 200])
    await opened(redis, 3)
    await started(redis, 3, 2, 0, 50)
    kept = (await lasting.with_outlooks(view(3, 6))).steps[0].outlook
    anew = (await Forecasts(redis).with_outlooks(view(3, 6))).steps[0].outlook
    assert kept is not None
    assert anew is not None
    assert kept.tail_s == pytest.approx(anew.tail_s, rel=0.02)
    assert kept.rollout_s == pytest.approx(anew.rollout_s, rel=0.02)


async def test_no_forecast_is_made_while_every_cell_is_needed(redis: Redis) -> None:
    await opened(redis, 0)
    full = view(0, 6).model_copy(update={"capacity": 2})
    assert (await Forecasts(redis).with_outlooks(full)).steps[0].outlook is None
