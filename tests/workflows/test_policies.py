"""The scheduling policies as a specification: what they may never do, and what the paper's rule says."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from workflows.contracts.configuration import POLICY_NAMES, SchedulerConfig
from workflows.scheduling.policies import POLICIES, decide
from workflows.scheduling.pool_view import CellView, PoolView, StepView


@st.composite
def views(draw: st.DrawFn) -> PoolView:
    steps = []
    for number in range(draw(st.integers(0, 3))):
        total = draw(st.integers(1, 200))
        ready = draw(st.integers(0, 40))
        steps.append(
            StepView(
                step=number,
                train=draw(st.booleans()),
                unfinished=draw(st.integers(0, total)),
                total=total,
                ready=ready,
                ready_tokens=ready * draw(st.integers(1, 20000)),
            )
        )
    open_steps = [step.step for step in steps if step.train]
    training = draw(st.sampled_from([-1, *open_steps[:1]]))
    count = draw(st.integers(1, 6))
    # A cell trains only if an earlier decision said so, and then the others could hold what was unfinished.
    unfinished = sum(step.unfinished for step in steps)
    capacity = draw(st.integers(1, 64))
    trainers = 0 if training < 0 else draw(st.integers(0, max(0, count - math.ceil(unfinished / capacity))))
    cells = [
        CellView(cell=f"cell-{i}", training_step=training if i < trainers else -1, core=i == 0 and trainers > 0)
        for i in range(count)
    ]
    config = SchedulerConfig(
        policy=draw(st.sampled_from(sorted(POLICIES))),
        training_cells=draw(st.integers(1, 4)),
        satellite_s=draw(st.floats(0, 30)),
    )
    return PoolView(run="r", cells=cells, steps=steps, capacity=capacity, scheduler=config)


def test_every_policy_that_a_configuration_may_name_is_there() -> None:
    assert set(POLICY_NAMES.built_in) == POLICIES.keys()


@given(views())
def test_every_cell_has_exactly_one_assignment_and_a_decision_its_reason(view: PoolView) -> None:
    decision = decide(view)
    assert set(decision.assignments) == {cell.cell for cell in view.cells}
    assert decision.reason


@given(views())
def test_no_policy_leaves_unfinished_episodes_without_a_serving_cell(view: PoolView) -> None:
    decision = decide(view)
    oldest = next((step for step in view.steps if step.train), None)
    holding = [step for step in view.steps if step.unfinished and (oldest is None or step.step <= oldest.step)]
    serving = [cell for cell, assignment in decision.assignments.items() if assignment.step < 0]
    if holding and view.scheduler.policy != "async":
        assert serving


@given(views(), st.integers(0, 6))
def test_when_serving_cells_are_lost_somebody_still_serves(view: PoolView, left: int) -> None:
    """Whoever is left, though all of them train: episodes of the oldest step would hold for ever, and with them it."""
    oldest = next((step for step in view.steps if step.train), None)
    if oldest is None or not oldest.unfinished:
        return
    cells = [CellView(cell=f"cell-{i}", training_step=oldest.step, core=i == 0) for i in range(left)]
    decision = decide(view.model_copy(update={"cells": cells}))
    assert not left or any(assignment.step < 0 for assignment in decision.assignments.values())


@st.composite
def progress(draw: st.DrawFn) -> tuple[PoolView, list[tuple[int, int, int]]]:
    """A pool whose cells all serve, and how one step's counts go on: (unfinished, ready, queued of the next step)."""
    view = draw(views())
    total = draw(st.integers(1, 200))
    unfinished = sorted(draw(st.lists(st.integers(0, total), max_size=12)), reverse=True)
    counts = [(left, draw(st.integers(0, 40)), draw(st.integers(0, 200))) for left in [total, *unfinished, 0]]
    cells = [CellView(cell=cell.cell) for cell in view.cells]
    return view.model_copy(update={"cells": cells, "steps": []}), counts


@given(progress())
def test_while_a_step_goes_on_no_cell_comes_back_from_it_and_it_is_trained_in_the_end(
    case: tuple[PoolView, list[tuple[int, int, int]]],
) -> None:
    """Whatever waits, and whatever the next step has queued: as many switches as cells at most."""
    view, counts = case
    total, trained = counts[0][0], set[str]()
    for unfinished, ready, queued in counts:
        steps = [
            StepView(step=0, train=True, unfinished=unfinished, total=total, ready=ready, ready_tokens=ready * 5000),
            StepView(step=1, train=True, unfinished=queued, total=200, ready=0),
        ]
        assignments = decide(view.model_copy(update={"steps": steps})).assignments
        now = {cell for cell, assignment in assignments.items() if assignment.step == 0}
        assert trained <= now
        trained = now
        cells = [
            CellView(cell=cell, training_step=assignment.step, core=assignment.core)
            for cell, assignment in assignments.items()
        ]
        view = view.model_copy(update={"cells": cells})
    assert sum(assignment.core for assignment in assignments.values()) == 1


@given(views())
def test_a_step_without_unfinished_episodes_has_a_core(view: PoolView) -> None:
    oldest = next((step for step in view.steps if step.train), None)
    if oldest is None or any(step.unfinished for step in view.steps if not step.train) or oldest.unfinished:
        return
    cores = [a for a in decide(view).assignments.values() if a.core]
    assert [core.step for core in cores] == [oldest.step]


@given(views())
def test_a_trainer_stays_with_its_step_while_that_is_the_oldest(view: PoolView) -> None:
    oldest = next((step for step in view.steps if step.train), None)
    if oldest is None or view.scheduler.policy != "watermark":
        return
    assignments = decide(view).assignments
    for cell in view.cells:
        if cell.training_step == oldest.step:
            assert assignments[cell.cell].step == oldest.step


@given(views())
def test_a_decision_that_is_carried_out_is_not_changed_again(view: PoolView) -> None:
    """No oscillation: the same counts and the decided roles give the same decision."""
    decision = decide(view)
    cells = [
        CellView(
            cell=cell.cell,
            training_step=decision.assignments[cell.cell].step,
            core=decision.assignments[cell.cell].core,
        )
        for cell in view.cells
    ]
    again = decide(view.model_copy(update={"cells": cells}))
    assert again.assignments == decision.assignments


def pool(unfinished: int, *, ready: int = 0, tokens: int = 0, policy: str = "watermark", cells: int = 2) -> PoolView:
    return PoolView(
        run="r",
        cells=[CellView(cell=f"cell-{i}") for i in range(cells)],
        steps=[StepView(step=0, train=True, unfinished=unfinished, total=96, ready=ready, ready_tokens=tokens)],
        capacity=24,
        scheduler=SchedulerConfig(policy=policy, satellite_s=5),
        tokens_per_s=1000,
    )


def trainers(view: PoolView) -> list[str]:
    return [cell for cell, assignment in decide(view).assignments.items() if assignment.step >= 0]


def test_the_core_leaves_rollout_when_the_others_can_hold_the_watermark_and_not_before() -> None:
    assert trainers(pool(25)) == []
    assert trainers(pool(24)) == ["cell-0"]


def test_a_satellite_joins_only_when_the_waiting_work_is_worth_a_switch() -> None:
    assert trainers(pool(0, ready=4, tokens=4000)) == ["cell-0"]
    assert trainers(pool(0, ready=4, tokens=40000)) == ["cell-0", "cell-1"]


def test_colocate_waits_for_the_last_episode_and_then_trains_everywhere() -> None:
    assert trainers(pool(1, ready=9, policy="colocate")) == []
    assert trainers(pool(0, ready=9, policy="colocate")) == ["cell-0", "cell-1"]


def test_the_static_split_never_moves() -> None:
    assert trainers(pool(96, policy="async")) == trainers(pool(0, ready=5, policy="async")) == ["cell-0"]


def test_the_last_cell_serves_an_evaluation_before_it_trains() -> None:
    view = pool(0, ready=3, tokens=3000, cells=1)
    evaluation = StepView(step=-1, train=False, unfinished=1, total=1, ready=0)
    assert trainers(view.model_copy(update={"steps": [evaluation, *view.steps]})) == []
    assert trainers(view) == ["cell-0"]


def test_filler_of_a_later_step_does_not_keep_the_core_from_ready_work() -> None:
    view = pool(10, ready=2, tokens=500)
    later = StepView(step=1, train=True, unfinished=96, total=96, ready=0)
    assert trainers(view.model_copy(update={"steps": [*view.steps, later]})) == ["cell-0"]
