"""The simulator against schedules computed by hand, and every policy against random workloads in it."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workflows.configuration import SchedulerConfig
from workflows.foresight import Clairvoyant
from workflows.policies import POLICIES
from workflows.simulated_run import Simulated
from workflows.simulated_work import (
    DrawnWork,
    PoolModel,
    SimulatedEpisode,
    SimulatedGroup,
    Steps,
    lower_bounds,
)
from workflows.simulator import best_split, simulate


def group(*works: float, tokens_per_s: float = 10.0) -> SimulatedGroup:
    return SimulatedGroup("task", tuple(SimulatedEpisode(work, tokens_per_s) for work in works))


def run(pool: PoolModel, steps: Steps, policy: str, staleness: int = 0, training_cells: int = 1) -> Simulated:
    config = SchedulerConfig.model_validate({"policy": policy, "training_cells": training_cells, "claim_s": 0.5})
    return simulate(pool, steps, config, max_staleness=staleness, timeline=True)


POOL = PoolModel(
    cells=2,
    capacity=2,
    train_tokens_per_s=100,
    switch_out_s=4,
    switch_in_s=2,
    update_s=3,
    micro_step_tokens=500,
    poll_s=0,
)
STEP: Steps = [[group(50, 50), group(100, 100)]]
"""500 tokens from each episode of the first group, 1000 from each of the second: 5 s and 10 s of training on a cell."""


def test_colocate_trains_on_all_cells_when_the_last_episode_has_ended() -> None:
    # 100 s of rollout, 4 s to leave it. 3000 tokens in six micro-steps over two cells: 15 s. The update: 3 s.
    assert run(POOL, STEP, "colocate").closed_s == pytest.approx([100 + 4 + 15 + 3])


def test_the_static_split_rolls_out_on_the_cells_that_are_left() -> None:
    # One cell serves: the first group until 50 s, the second until 150 s; the other cell trains alone.
    result = run(POOL, STEP, "async")
    assert result.closed_s == pytest.approx([150 + 20 + 3])
    assert result.switches == 1


def test_under_the_watermark_rule_a_cell_trains_while_the_tail_runs() -> None:
    # At 50 s two episodes are left, which one cell holds: the other trains the first group from 54 s to 64 s. At 100 s
    # the second group's 20 s of training wait; the satellite takes 4 s to come and then its share.
    result = run(POOL, STEP, "watermark")
    early = [(s.cell, s.start, s.end) for s in result.segments if s.what == "train" and s.start < 100]
    assert early == [(0, pytest.approx(54), pytest.approx(59)), (0, pytest.approx(59), pytest.approx(64))]
    assert 100 + 10 + 3 <= result.closed_s[0] < 100 + 20 + 3


def test_a_trainer_stays_with_its_step_until_that_is_closed() -> None:
    result = run(POOL, STEP * 3, "watermark", staleness=1)
    for cell in range(POOL.cells):
        roles = [(s.what, s.step, s.end) for s in result.segments if s.cell == cell]
        for (what, step, end), (then, _, _) in pairwise(roles):
            if what in ("train", "wait") and then == "switch":
                assert end >= result.closed_s[step]


def test_the_next_step_opens_with_the_commit_or_earlier_by_the_staleness() -> None:
    # Alone in the pool, a step's rollout takes 100 s on two cells, and both train: the next one starts after it.
    one = run(POOL, STEP, "colocate").total_s
    assert run(POOL, STEP * 2, "colocate").closed_s[1] == pytest.approx(2 * one + POOL.switch_in_s)
    # With staleness 1 two of its long episodes start at 50 s, on places that the first step's short ones have left.
    steps: Steps = [[group(100, 100), group(50, 50)]] * 2
    assert run(POOL, steps, "colocate", staleness=1).closed_s[1] == pytest.approx(2 * one + POOL.switch_in_s - 50)


def test_a_budget_ends_an_episode_by_its_active_time_alone() -> None:
    limited = POOL.model_copy(update={"limit_s": 60.0})
    # The second group ends at 60 s with 600 tokens each.
    assert run(limited, STEP, "colocate").closed_s[0] == pytest.approx(60 + 4 + (1000 + 1200) / 100 / 2 + 3, abs=3)
    # With one cell its second group waits 50 s for a place, and still has its whole budget.
    single = limited.model_copy(update={"cells": 1})
    assert run(single, STEP, "colocate").closed_s[0] == pytest.approx(50 + 60 + 4 + 22 + 3)


def test_episodes_are_faster_in_less_company() -> None:
    lone: Steps = [[group(100.0)]]
    pool = POOL.model_copy(update={"cells": 1, "solo_speedup": 3.0})
    # Half of the places are taken: a second of work takes 1/3 + 2/3 · 1/2 = 2/3 s.
    assert run(pool, lone, "colocate").closed_s[0] == pytest.approx(100 * 2 / 3 + 4 + 10 + 3)


def test_weights_are_published_to_every_cell_before_it_serves_the_next_step() -> None:
    pool = POOL.model_copy(update={"publish_s": 7.0})
    one = run(pool, STEP, "async").total_s
    assert run(pool, STEP * 2, "async").closed_s[1] - one == pytest.approx(7 + 150 + 20 + 3)


def test_the_lower_bounds_by_hand() -> None:
    bounds = lower_bounds(POOL, STEP * 2, 0)
    # Rollout: 300 s over 2 × 2 places; training: 30 s over 2 cells.
    assert bounds.work_s == pytest.approx(2 * (75 + 15), abs=0.1)
    # The longest episode, its group's 20 s of training on both cells, the update.
    assert bounds.chain_s == pytest.approx(2 * (100 + 10 + 3), abs=0.1)
    assert lower_bounds(POOL, STEP * 2, 1).chain_s == pytest.approx(100 + 10 + 3, abs=0.1)


def test_the_same_inputs_give_the_same_run() -> None:
    work = DrawnWork(
        steps=2, groups=4, group_size=4, median_s=100, spread=0.8, correlation=0.5, tokens_per_s=10, tasks=8, seed=3
    )
    for policy in sorted(POLICIES):
        first, again = (run(POOL, work.draw(), policy, 1) for _ in range(2))
        assert first.closed_s == again.closed_s
        assert first.reasons == again.reasons


def test_every_decision_that_changes_a_role_has_its_reason() -> None:
    for policy in sorted(POLICIES):
        reasons = run(POOL, STEP * 2, policy, 1).reasons
        assert reasons
        assert all(reason for _, reason in reasons)


# --- properties -----------------------------------------------------------------------------------------------------


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[PoolModel, Steps, str, int]:
    pool = PoolModel(
        cells=draw(st.integers(1, 6)),
        capacity=draw(st.integers(1, 8)),
        train_tokens_per_s=draw(st.sampled_from([20.0, 200.0, 2000.0])),
        switch_out_s=draw(st.sampled_from([0.0, 1.0, 20.0])),
        switch_in_s=draw(st.sampled_from([0.0, 5.0])),
        publish_s=draw(st.sampled_from([0.0, 2.0])),
        update_s=draw(st.sampled_from([0.0, 5.0])),
        move_s=draw(st.sampled_from([0.0, 3.0])),
        grade_s=draw(st.sampled_from([0.0, 2.0])),
        limit_s=draw(st.sampled_from([60.0, 300.0, 1e9])),
        solo_speedup=draw(st.sampled_from([1.0, 3.0])),
        micro_step_tokens=draw(st.sampled_from([500, 5000])),
        poll_s=draw(st.sampled_from([0.0, 0.1, 3.0])),
    )
    work = DrawnWork(
        steps=draw(st.integers(1, 4)),
        groups=draw(st.integers(1, 6)),
        group_size=draw(st.integers(1, 6)),
        median_s=draw(st.sampled_from([10.0, 100.0])),
        spread=draw(st.sampled_from([0.0, 0.5, 1.5])),
        correlation=draw(st.sampled_from([0.0, 0.7, 1.0])),
        tokens_per_s=draw(st.sampled_from([0.0, 1.0, 50.0])),
        tasks=draw(st.integers(1, 12)),
        seed=draw(st.integers(0, 1000)),
    )
    return pool, work.draw(), draw(st.sampled_from(sorted(POLICIES))), draw(st.integers(0, 2))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_no_policy_strands_starves_oscillates_or_beats_the_bound(scenario: tuple[PoolModel, Steps, str, int]) -> None:
    """Every episode ends and every step is closed in order, whatever later steps have waiting: `simulate` raises
    Stranded otherwise. Switches are bounded: a cell leaves rollout for a step at most once, and comes back once."""
    pool, steps, policy, staleness = scenario
    result = run(pool, steps, policy, staleness)
    assert len(result.closed_s) == len(steps)
    assert result.closed_s == sorted(result.closed_s)
    assert result.episodes >= sum(len(group.episodes) for group in steps[-1])
    assert max(result.switches_of_step.values(), default=0) <= 2 * pool.cells
    assert result.total_s >= lower_bounds(pool, steps, staleness).bound_s * (1 - 1e-9)
    assert result.utilisation <= 1 + 1e-9


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_running_episodes_keep_their_cells_and_waiting_training_has_one(
    scenario: tuple[PoolModel, Steps, str, int],
) -> None:
    """At every decision: what the oldest step has running can be held, and once its episodes have ended, somebody
    trains what waits."""
    pool, steps, policy, staleness = scenario
    result = run(pool, steps, policy, staleness)
    assert result.faults == []


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_no_cell_is_without_a_role_while_work_waits(scenario: tuple[PoolModel, Steps, str, int]) -> None:
    """Every cell is accounted for at all times: it serves, trains, waits for its step's work, or is on its way."""
    pool, steps, policy, staleness = scenario
    result = run(pool, steps, policy, staleness)
    for cell in range(pool.cells):
        segments = [s for s in result.segments if s.cell == cell]
        assert sum(s.end - s.start for s in segments) == pytest.approx(result.total_s)
        assert all(one.end == other.start for one, other in pairwise(segments))


def test_training_is_not_starved_by_the_next_steps_episodes() -> None:
    """With twice as many steps open as cells, a step is closed soon after its own tail has ended."""
    steps: Steps = [[group(50, 60), group(100, 120)] for _ in range(12)]
    for policy in sorted(POLICIES):
        result = run(POOL, steps, policy, 2)
        alone = run(POOL, steps[:1], policy, 0).total_s
        assert max(result.step_s) <= 2.5 * alone


def test_predictive_learns_which_tasks_are_long_and_is_close_to_knowing_it() -> None:
    pool = PoolModel(
        cells=4, capacity=16, train_tokens_per_s=60_000, switch_out_s=8, switch_in_s=3, update_s=10, poll_s=5
    )
    steps = DrawnWork(
        steps=8, groups=16, group_size=8, median_s=1000, spread=0.8, correlation=0.9, tokens_per_s=200, tasks=16
    ).draw()
    learned = run(pool, steps, "predictive").total_s
    known = simulate(
        pool, steps, SchedulerConfig(policy="predictive"), foresight=Clairvoyant(pool), longest_first=True
    ).total_s
    assert learned < run(pool, steps, "watermark").total_s
    assert known / learned > 0.9


def test_the_best_split_is_the_best() -> None:
    steps: Steps = [[group(10, 10, tokens_per_s=1000.0)] * 4] * 2
    pool = POOL.model_copy(update={"cells": 4})
    times = {n: run(pool, steps, "async", training_cells=n).total_s for n in (1, 2, 3)}
    assert best_split(pool, steps, SchedulerConfig()) == min(times, key=lambda n: times[n])


def test_a_run_of_48_steps_with_512_episodes_on_16_cells_takes_seconds() -> None:
    pool = PoolModel(
        cells=16, capacity=16, train_tokens_per_s=200_000, switch_out_s=8, switch_in_s=3, update_s=30, poll_s=10
    )
    steps = DrawnWork(
        steps=48, groups=32, group_size=16, median_s=3000, spread=0.8, correlation=0.7, tokens_per_s=200, tasks=128
    ).draw()
    started = time.process_time()
    run(pool, steps, "predictive", 1)
    assert time.process_time() - started < 10
