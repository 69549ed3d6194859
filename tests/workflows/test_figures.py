"""Figures of episodes: they add up in any order and grouping, and lie flat beside the rest of a result."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from workflows.contracts.configuration import shared
from workflows.contracts.results import Figures, GroupResult, StepResult

counts = st.integers(0, 1 << 40)
figures = st.builds(
    Figures,
    valid=counts,
    outcomes=st.dictionaries(st.sampled_from(["completed", "timed_out", "cancelled"]), st.integers(1, 1 << 20)),
    held_s=counts.map(float),
    moved_bytes=counts,
)


@given(figures, figures, figures)
def test_they_add_up_in_any_order_and_grouping(a: Figures, b: Figures, c: Figures) -> None:
    assert (a + b) + c == a + (b + c) == c + b + a
    assert a + Figures() == a
    total = a + b
    assert (total.moved_bytes, total.held_s) == (a.moved_bytes + b.moved_bytes, a.held_s + b.held_s)
    assert sum(total.outcomes.values()) == sum(a.outcomes.values()) + sum(b.outcomes.values())


def test_a_steps_are_those_of_its_groups() -> None:
    one = GroupResult(group=0, task="t", valid=3, passed=1, reward_sum=1.5, outcomes={"completed": 3}, moved_calls=2)
    two = GroupResult(group=1, task="t", valid=1, reward_sum=0, outcomes={"cancelled": 1, "completed": 1}, held_s=2.5)
    step = StepResult(
        **shared(Figures() + one + two, Figures),
        run="r",
        step=0,
        version=1,
        train=True,
        candidate_ref="c",
        episodes=5,
        mean_reward=0.375,
    )
    written = json.loads(step.model_dump_json())
    assert (written["valid"], written["passed"], written["moved_calls"], written["held_s"]) == (4, 1, 2, 2.5)
    assert written["outcomes"] == {"completed": 4, "cancelled": 1}
    assert StepResult.model_validate(written) == step
