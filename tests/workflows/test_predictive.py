"""The predictive policy as a specification: what it may never do, and what forecasts and prices make it do."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workflows.contracts.configuration import SchedulerConfig
from workflows.scheduling.forecasts import Durations, GroupState
from workflows.scheduling.policies import decide
from workflows.scheduling.pool_view import CellView, Outlook, PoolView, StepView
from workflows.scheduling.predictive import admission_order


@st.composite
def outlooks(draw: st.DrawFn) -> Outlook:
    due = sorted(
        draw(st.lists(st.tuples(st.floats(0, 9000), st.integers(0, 10_000_000)), min_size=1, max_size=6)),
    )
    latest = [seconds + draw(st.floats(0, 5000)) for seconds, _ in due]
    tail = draw(st.floats(0, 9000))
    return Outlook(
        tail_s=tail, rollout_s=draw(st.floats(0, 50000)), due=due, latest_s=draw(st.sampled_from([[], latest]))
    )


@st.composite
def views(draw: st.DrawFn) -> PoolView:
    steps = []
    for number in range(draw(st.integers(1, 3))):
        total = draw(st.integers(1, 200))
        ready = draw(st.integers(0, 40))
        steps.append(
            StepView(
                step=number,
                train=number > 0 or draw(st.booleans()),
                unfinished=draw(st.integers(0, total)),
                total=total,
                ready=ready,
                ready_tokens=ready * draw(st.integers(1, 2_000_000)),
                outlook=draw(st.one_of(st.none(), outlooks())),
            )
        )
    first = next((step for step in steps if step.train), None)
    count, capacity = draw(st.integers(1, 8)), draw(st.integers(1, 64))
    holding = sum(step.unfinished for step in steps if first is None or step.step <= first.step)
    trainers = draw(st.integers(0, max(0, count - math.ceil(holding / capacity)))) if first else 0
    cells = [
        CellView(cell=f"cell-{i}", training_step=first.step if first and i < trainers else -1, core=0 == i < trainers)
        for i in range(count)
    ]
    switch = draw(st.one_of(st.none(), st.floats(0, 100)))
    return PoolView(
        run="r",
        cells=cells,
        steps=steps,
        capacity=capacity,
        scheduler=SchedulerConfig(policy="predictive", satellite_s=draw(st.floats(0, 30))),
        tokens_per_s=draw(st.floats(1, 1e6)),
        switch_out_s=switch,
        switch_in_s=switch,
        solo_speedup=draw(st.sampled_from([1.0, 3.0])),
    )


def trainers(view: PoolView) -> int:
    return sum(assignment.step >= 0 for assignment in decide(view).assignments.values())


@settings(deadline=None)
@given(views())
def test_unfinished_episodes_of_the_oldest_step_always_keep_the_cells_that_hold_them(view: PoolView) -> None:
    first = next((step for step in view.steps if step.train), None)
    holding = sum(step.unfinished for step in view.steps if first is None or not step.train or step is first)
    serving = len(view.cells) - trainers(view)
    assert serving >= min(len(view.cells), math.ceil(holding / view.capacity))


@settings(deadline=None)
@given(views())
def test_a_trainer_stays_and_only_the_oldest_step_is_trained(view: PoolView) -> None:
    first = next((step for step in view.steps if step.train), None)
    assignments = decide(view).assignments
    for cell in view.cells:
        if first is not None and cell.training_step == first.step:
            assert assignments[cell.cell].step == first.step
    assert {one.step for one in assignments.values()} <= {-1, first.step if first else -1}


@settings(deadline=None)
@given(views())
def test_a_step_whose_episodes_have_ended_is_trained_whatever_later_steps_have_queued(view: PoolView) -> None:
    first = next((step for step in view.steps if step.train), None)
    if first is None or first.unfinished or any(step.unfinished for step in view.steps if not step.train):
        return
    cores = [one for one in decide(view).assignments.values() if one.core]
    assert [core.step for core in cores] == [first.step]


@settings(deadline=None)
@given(views())
def test_roles_only_ever_go_one_way_within_a_step(view: PoolView) -> None:
    """Whatever it decides again about the same counts, no trainer comes back: at most as many switches as cells."""
    for _ in range(len(view.cells) + 1):
        decision = decide(view)
        assert decision.reason
        before = trainers(view)
        view = view.model_copy(
            update={
                "cells": [
                    CellView(
                        cell=cell.cell,
                        training_step=decision.assignments[cell.cell].step,
                        core=decision.assignments[cell.cell].core,
                    )
                    for cell in view.cells
                ]
            }
        )
        assert trainers(view) >= before
    assert decide(view).assignments == decide(view).assignments


def pool(unfinished: int, outlook: Outlook | None, *, later: int = 0, ready: int = 8, switch: float = 5.0) -> PoolView:
    steps = [
        StepView(
            step=0,
            train=True,
            unfinished=unfinished,
            total=96,
            ready=ready,
            ready_tokens=ready * 10_000,
            outlook=outlook,
        )
    ]
    if later:
        steps.append(StepView(step=1, train=True, unfinished=later, total=96, ready=0))
    return PoolView(
        run="r",
        cells=[CellView(cell=f"cell-{i}") for i in range(4)],
        steps=steps,
        capacity=24,
        scheduler=SchedulerConfig(policy="predictive"),
        tokens_per_s=1000,
        switch_out_s=switch,
        switch_in_s=switch,
    )


def test_a_cell_does_not_wait_for_a_long_tail_that_later_episodes_could_have_filled() -> None:
    tail = Outlook(tail_s=3000, rollout_s=1000, due=[(3000.0, 10_000)])
    # 80 s of training wait, and the tail takes 3000 s: with filler it is too early, without there is nothing better.
    assert trainers(pool(10, tail, later=96)) == 0
    assert trainers(pool(10, tail)) >= 1


def test_training_starts_before_the_tail_ends_when_it_would_outlast_it() -> None:
    tail = Outlook(tail_s=100, rollout_s=30, due=[(100.0, 10_000)])
    view = pool(10, tail, later=0, ready=400)
    assert trainers(view) == 3


def test_a_dear_switch_is_not_made_for_little_work() -> None:
    assert trainers(pool(0, None, ready=8, switch=5.0)) == 4
    assert trainers(pool(0, None, ready=8, switch=500.0)) == 1


def test_a_reason_names_the_forecast_and_the_price() -> None:
    reason = decide(pool(10, Outlook(tail_s=100, due=[(100.0, 10_000)]))).reason
    assert "tail in 100 s" in reason
    assert "switch costs 10.0 s" in reason


def test_groups_that_are_expected_to_take_longest_start_first_and_equals_in_their_order() -> None:
    assert admission_order([10.0, 50.0, 20.0]) == [1, 2, 0]
    assert admission_order([10.0, 10.0, 10.0]) == [0, 1, 2]


# --- forecasts ------------------------------------------------------------------------------------------------------


def test_a_task_that_took_long_is_expected_to_take_long_and_the_others_what_all_took() -> None:
    durations = Durations(limit_s=10_000)
    for _ in range(8):
        durations.observe("long", 4000, 0)
        durations.observe("short", 100, 0)
    assert durations.predict("long").seconds > 2000
    assert durations.predict("short").seconds < 200
    assert 200 < durations.predict("unknown").seconds < 2000


def test_siblings_that_have_ended_move_the_forecast_of_the_rest() -> None:
    durations = Durations(limit_s=10_000)
    for task in range(10):
        for _ in range(4):
            durations.observe(f"task-{task}", 100 * 2.0**task, 0)
    alone = durations.predict("new").seconds
    short = durations.predict_sibling("new", [math.log(120.0)] * 6, 0, 0.0).seconds
    running = durations.predict_sibling("new", [], 6, 20_000.0).seconds
    assert short < alone / 2
    assert running > alone * 2


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 5000), st.integers(0, 10**6)), max_size=30),
    st.floats(0, 5000),
    st.integers(1, 32),
)
def test_forecasts_stay_within_the_budget(seen: list[tuple[str, float, int]], elapsed: float, unfinished: int) -> None:
    durations = Durations(limit_s=5000)
    for task, seconds, tokens in seen:
        durations.observe(task, seconds, tokens)
    groups = [
        GroupState(predicted=durations.predict(task), unfinished=unfinished, elapsed_s=elapsed) for task in "abcd"
    ]
    outlook = durations.outlook(groups, capacity=8)
    assert 0 <= outlook.tail_s <= 5000 - elapsed + 1e-6
    assert outlook.due == sorted(outlook.due)
    assert all(seconds <= latest + 1e-6 for (seconds, _), latest in zip(outlook.due, outlook.latest_s, strict=True))


def test_an_episode_that_has_run_long_is_expected_to_run_on() -> None:
    durations = Durations(limit_s=1e6)
    for seconds in (100, 200, 400, 800):
        durations.observe("task", seconds, 0)
    predicted = durations.predict("task")
    left = [durations.remaining(predicted, elapsed, 0.5) for elapsed in (0.0, 1000.0, 4000.0)]
    assert left[0] == pytest.approx(predicted.seconds, rel=0.01)
    assert left[2] > left[1]
