"""The simulator against schedules computed by hand, and every policy against random workloads in it."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workflows.contracts.configuration import SchedulerConfig
from workflows.scheduling.policies import POLICIES
from workflows.scheduling.pool_view import Assignment
from workflows.simulation.foresight import Clairvoyant
from workflows.simulation.run import Simulated
from workflows.simulation.simulator import Simulation
from workflows.simulation.workload import (
    Absence,
    DrawnWork,
    PoolModel,
    SimulatedEpisode,
    SimulatedGroup,
    Steps,
    lower_bounds,
)


def group(*works: float, tokens_per_s: float = 10.0) -> SimulatedGroup:
    return SimulatedGroup("task", tuple(SimulatedEpisode(work, tokens_per_s) for work in works))


class Judged(Simulation):
    """Fails at a decision that no policy may make. A static split is free to serve with what it has."""

    def _decide(self) -> None:
        super()._decide()
        if not self.open:
            return
        oldest = self.open[0]
        present = [cell for cell in self.cells if not cell.away]
        trainers = sum(cell.assigned.step == oldest.number for cell in present)
        waits = bool(present) and not oldest.unfinished and bool(oldest.ledger.waiting)
        assert trainers or not waits, f"{self.now:.1f} s: training waits, and nobody trains"
        # Where cells have been lost, those that train stay: what is left has to do, but something has to be left.
        needed = min(1, oldest.unfinished) if self.pool.absences else math.ceil(oldest.running / self.pool.capacity)
        enough = len(present) - trainers >= min(needed, len(present)) or self.scheduler.policy == "async"
        assert enough, f"{self.now:.1f} s: too few serve for the oldest step's running episodes"


def run(pool: PoolModel, steps: Steps, policy: str, staleness: int = 0, training_cells: int = 1) -> Simulated:
    config = SchedulerConfig.model_validate({"policy": policy, "training_cells": training_cells, "claim_s": 0.5})
    return Judged(pool, steps, config, staleness, timeline=True).run()


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


def test_episodes_that_all_run_at_once_slow_each_other_on_the_cells_that_are_left() -> None:
    # All four on one cell for two go at 2/3 until the first group ends at 75 s; the second has 50 s of work left.
    pool = POOL.model_copy(update={"slots": 4, "solo_speedup": 2.0})
    assert run(pool, STEP, "async").closed_s == pytest.approx([125 + 20 + 3])


def test_under_the_watermark_rule_a_cell_trains_while_the_tail_runs() -> None:
    # At 50 s two episodes are left, which one cell holds: the other trains the first group from 54 s to 64 s. At 100 s
    # the second group's 20 s of training wait; the satellite takes 4 s to come and then its share.
    result = run(POOL, STEP, "watermark")
    early = [(s.cell, s.start, s.end) for s in result.segments if s.what == "train" and s.start < 100]
    assert [cell for cell, _, _ in early] == [0, 0]
    assert [time for _, *times in early for time in times] == pytest.approx([54, 59, 59, 64])
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


def test_tools_take_as_long_in_any_company_and_calls_by_those_that_wait_for_one() -> None:
    pool = POOL.model_copy(update={"slots": 8, "solo_speedup": 1.6, "tool_share": 0.5})
    assert [pool.speed(occupied) for occupied in (0, 1)] == pytest.approx([1.6, 1.0])
    # Of a second of work on a full cell half goes into tools; alone the calls take 1 / 1.6 - 0.5 s, and 3/4 s more for
    # every full cell's worth of episodes of which the share calls / (tools + calls) waits for one.
    calls = 1 / pool.speed(3.0) - 0.5
    assert calls == pytest.approx(0.125 + 0.75 * 3.0 * calls / (0.5 + calls))


def test_weights_are_published_to_every_cell_before_it_serves_the_next_step() -> None:
    pool = POOL.model_copy(update={"publish_s": 7.0})
    one = run(pool, STEP, "async").total_s
    assert run(pool, STEP * 2, "async").closed_s[1] - one == pytest.approx(7 + 150 + 20 + 3)


def test_fixed_seconds_add_up_by_hand() -> None:
    """Opening, start-up, grading, a claim's own and a satellite's seconds: each where it belongs, none in a budget."""
    pool = POOL.model_copy(update={"limit_s": 100.0, "open_s": 11.0, "start_s": 7.0, "grade_s": 5.0})
    # The last group is graded while cells switch and train the first one: that shows only when it takes longer.
    alone = 11 + 7 + 100 + 4 + 15 + 3
    assert run(pool, STEP, "colocate").total_s == pytest.approx(alone)
    assert run(pool.model_copy(update={"grade_s": 20.0}), STEP, "colocate").total_s == pytest.approx(
        11 + 7 + 100 + 20 + 10 + 3
    )
    # The next step's opening takes longer than the cells' way back into rollout.
    assert run(pool, STEP * 2, "colocate").total_s == pytest.approx(2 * alone)
    slow = pool.model_copy(update={"claim_overhead_s": 2.0, "gather_s": 1.5})
    # Six claims of 5 s over two cells: three each; one satellite.
    assert run(slow, STEP, "colocate").total_s == pytest.approx(alone + 3 * 2 + 1.5)


def test_an_episode_that_starts_up_holds_a_place() -> None:
    pool = POOL.model_copy(update={"cells": 1, "start_s": 10.0})
    # Two after two: the second pair starts up only when the first has ended.
    assert run(pool, STEP, "colocate").total_s == pytest.approx(10 + 50 + 10 + 100 + 4 + 30 + 3)


def test_a_trainer_that_is_lost_takes_its_sum_along_and_a_new_core_redoes_only_that() -> None:
    # Both cells train from 104 s; at 112 s cell 1 has trained one claim of 500 tokens and is at its second.
    away = POOL.model_copy(update={"absences": [Absence(cell=1, at_s=112.0)]})
    result = run(away, STEP, "colocate")
    assert result.redone_tokens == 1000
    assert result.total_s == pytest.approx(104 + 30 + 3)
    # The core is lost: the other one keeps its sum, loads the optimizer's state, and trains all the rest.
    away = POOL.model_copy(update={"absences": [Absence(cell=0, at_s=112.0)]})
    assert run(away, STEP, "colocate").total_s == pytest.approx(104 + 30 + 3)
    assert result.away_s == pytest.approx(result.total_s - 112)


def test_an_update_that_loses_a_sum_is_made_again() -> None:
    pool = POOL.model_copy(update={"update_s": 20.0, "absences": [Absence(cell=1, at_s=130.0)]})
    # Both have trained 15 s until 119 s; the update breaks off at 130 s, and 1500 tokens are trained again.
    assert run(pool, STEP, "colocate").total_s == pytest.approx(130 + 15 + 20)


def test_a_serving_cell_that_is_lost_costs_places_until_it_is_back() -> None:
    pool = POOL.model_copy(update={"absences": [Absence(cell=1, at_s=20.0, for_s=30.0)]})
    # 20 s at full speed, 30 s and the 2 s of coming back at half of it.
    assert run(pool, STEP, "colocate").total_s == pytest.approx(100 + 16 + 4 + 15 + 3)
    # The trainer goes back to rollout when nothing else is left to serve, and its sum is trained again.
    for policy in ("watermark", "predictive"):
        lost = POOL.model_copy(update={"absences": [Absence(cell=1, at_s=70.0)]})
        assert len(run(lost, STEP, policy).closed_s) == 1


def test_a_cell_that_is_asked_to_go_trains_its_step_to_the_end() -> None:
    asked = POOL.model_copy(update={"absences": [Absence(cell=1, at_s=112.0, asked=True)]})
    result = run(asked, STEP * 2, "colocate")
    assert result.closed_s[0] == pytest.approx(122)
    assert result.redone_tokens == 0
    # Then one cell is left: 50 s, 100 s, and 30 s of training.
    assert result.closed_s[1] == pytest.approx(122 + 2 + 150 + 4 + 30 + 3)


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


Scenario = tuple[PoolModel, Steps, str, int]
RANDOM = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def losses(draw: st.DrawFn) -> Scenario:
    """Cells are lost, asked to go, and come back; cell 0 always stays."""
    pool, steps, policy, staleness = draw(scenarios())
    absences = [
        Absence(
            cell=cell,
            at_s=draw(st.floats(0, 400)),
            for_s=draw(st.one_of(st.just(1e9), st.floats(1, 300))),
            asked=draw(st.booleans()),
        )
        for cell in range(1, pool.cells)
        if draw(st.booleans())
    ]
    return pool.model_copy(update={"absences": absences}), steps, policy, staleness


def check(scenario: Scenario) -> Simulated:
    """What holds of every run, besides its decisions (`Judged`).

    It raises Stranded when something is left that would never be done.
    """
    pool, steps, policy, staleness = scenario
    result = run(pool, steps, policy, staleness)
    # Steps are opened and closed in order, each with all its episodes ended, none too many versions ahead.
    assert list(result.episodes_of) == list(range(len(steps)))
    assert list(result.episodes_of.values()) == [sum(len(group.episodes) for group in groups) for groups in steps]
    assert [step for step, _ in result.opened_at] == list(range(len(steps)))
    assert all(step - version <= staleness for step, version in result.opened_at)
    # No oscillation: a cell leaves rollout for a step at most once, and comes back once; also after each loss.
    assert max(result.switches_of_step.values(), default=0) <= 2 * (pool.cells + 2 * len(pool.absences))
    assert result.utilisation <= 1 + 1e-9
    # A step's micro-steps wait for the update before.
    for segment in result.segments:
        if segment.what == "train" and segment.step:
            assert segment.start >= result.closed_s[segment.step - 1] - 1e-6
    return result


@RANDOM
@given(scenarios())
def test_no_policy_strands_starves_oscillates_or_beats_the_bound(scenario: Scenario) -> None:
    pool, steps, _, staleness = scenario
    result = check(scenario)
    assert max(result.switches_of_step.values(), default=0) <= 2 * pool.cells
    assert result.total_s >= lower_bounds(pool, steps, staleness).bound_s * (1 - 1e-9)


@RANDOM
@given(losses())
def test_nothing_is_stranded_when_cells_are_lost_leave_and_come(scenario: Scenario) -> None:
    check(scenario)


class Watching(Simulation):
    """Looks at every interval of time: whoever could work does, but for a switch and a look of the policy."""

    neglected_s = 0.0
    told: tuple[Assignment, ...] = ()

    def _advance(self, at: float) -> None:
        if at - self.now > 1e-6 and self.open:
            waiting = self._serving() * self.pool.capacity - sum(step.placed for step in self.open)
            assert waiting <= 0 or not any(step.queued for step in self.open), "a place is free, an episode has none"
            for step in self.open:
                assert not (step.ledger.waiting and step.ledger.idle), "a trainer idles, a micro-step waits"
            # What only a decision can change has to be changed by one soon.
            oldest = self.open[0]
            on_their_way = any(cell.moving for cell in self.cells)
            untrained = not oldest.unfinished and oldest.ledger.waiting and not oldest.ledger.trainers
            unserved = any(step.placed or step.queued for step in self.open) and not self._serving()
            untrained = untrained or (unserved and not oldest.ledger.trainers)
            told = tuple(cell.assigned for cell in self.cells)
            if told != self.told:  # steps without length may each wait for a look of their own
                self.neglected_s, self.told = 0.0, told
            self.neglected_s = self.neglected_s + at - self.now if untrained and not on_their_way else 0.0
            assert self.neglected_s <= self.pool.poll_s + 1e-6
        super()._advance(at)


@RANDOM
@given(st.one_of(scenarios(), losses()))
def test_no_cell_idles_longer_than_a_look_while_it_could_work(scenario: Scenario) -> None:
    pool, steps, policy, staleness = scenario
    config = SchedulerConfig.model_validate({"policy": policy, "claim_s": 0.5})
    Watching(pool, steps, config, staleness).run()


@RANDOM
@given(st.one_of(scenarios(), losses()))
def test_every_cell_is_accounted_for_at_all_times(scenario: Scenario) -> None:
    """It serves, trains, waits for its step's work, is on its way, or is away."""
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
    predictive = SchedulerConfig(policy="predictive")
    known = Simulation(pool, steps, predictive, foresight=Clairvoyant(pool), longest_first=True).run().total_s
    assert learned < run(pool, steps, "watermark").total_s
    assert known / learned > 0.9


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
