"""What the leaves of an episode are, told as stories of real harnesses."""

from __future__ import annotations

from hypothesis import given, settings
from trajectory_reference import Script, kinds, scripts

from trajectory.kinds import classify


def _kinds(script: Script) -> dict[int, str]:
    return {leaf.seq: str(leaf.kind) for leaf in classify(script.records)}


@settings(max_examples=500, deadline=None)
@given(scripts(14))
def test_kinds_of_random_episodes_are_those_of_the_reference(script: Script) -> None:
    assert _kinds(script) == kinds(script.records)


def test_a_plain_episode_is_one_main_path() -> None:
    script = Script()
    for i in range(5):
        script.call([1, 2], [3], parent=i - 1)
    assert _kinds(script) == {4: "main"}


def test_two_compactions_give_three_main_paths_and_two_summaries() -> None:
    script = Script()
    last = -1
    for _ in range(2):
        last = script.call([1, 2], [3])
        last = script.call([4], [5], parent=last)
        script.call([6], [7], parent=last, summary=True)
    script.call([1, 8], [9])
    assert _kinds(script) == {1: "main", 2: "main_summary", 4: "main", 5: "main_summary", 6: "main"}


def test_a_summary_that_branches_before_the_last_turn_leaves_that_turn_on_the_main_path() -> None:
    script = Script()
    script.call([1, 2], [3])
    script.call([4, 5], [6], parent=0)
    script.call([7], [8], parent=1, kept=5, summary=True)  # inside the last user message
    script.call([1, 9], [3])
    assert _kinds(script) == {1: "main", 2: "main_summary", 3: "main"}


def test_a_compaction_that_keeps_the_system_prompt_or_the_first_turn_still_opens_a_window() -> None:
    for kept in (1, 3):
        script = Script()
        script.call([1, 2], [3])
        script.call([4], [5], parent=0)
        script.call([6], [7], parent=1, summary=True)
        script.call([8], [9], parent=0, kept=kept)
        script.call([4], [5], parent=3)
        assert _kinds(script) == {1: "main", 2: "main_summary", 4: "main"}


def test_a_compaction_that_nobody_recognised_still_opens_a_window_when_only_the_system_prompt_is_kept() -> None:
    script = Script()
    script.call([1, 2], [3])
    script.call([4], [5], parent=0)
    script.call([8], [9], parent=0, kept=1)
    script.call([4], [5], parent=2)
    script.call([8, 8], [9], parent=0, kept=1)
    assert _kinds(script) == {1: "main", 3: "main", 4: "main"}


def test_a_first_turn_that_was_dropped_and_asked_for_again_is_dead() -> None:
    for kept in (1, 2):
        script = Script()
        script.call([1, 2], [3])
        script.call([6], [7], parent=0, kept=kept)
        script.call([4], [5], parent=1)
        assert _kinds(script) == {0: "dead", 2: "main"}


def test_what_a_restart_from_the_first_prompt_left_behind_is_dead() -> None:
    script = Script()
    script.call([1, 2], [3])
    script.call([4], [5], parent=0)
    script.call([], [6], parent=0, kept=2)
    script.call([4], [5], parent=2)
    assert _kinds(script) == {1: "dead", 3: "main"}


def test_a_line_that_goes_on_after_an_unused_summary_stays_one_window() -> None:
    script = Script()
    script.call([1, 2], [3])
    script.call([6], [7], parent=0, summary=True)
    script.call([4], [5], parent=0)
    assert _kinds(script) == {1: "main_summary", 2: "main"}


def test_a_line_that_goes_on_from_its_summary_is_one_main_path() -> None:
    script = Script()
    script.call([1, 2], [3])
    script.call([6], [7], parent=0, summary=True)
    script.call([4], [5], parent=1)
    assert _kinds(script) == {2: "main"}


def test_a_dropped_turn_is_dead() -> None:
    script = Script()
    script.call([1, 2], [3])
    script.call([4], [5], parent=0)
    script.call([6], [7], parent=1, kept=4)  # keeps the user message of call 1 but not its turn
    assert _kinds(script) == {1: "dead", 2: "main"}


def test_of_two_identical_samples_the_one_that_is_not_continued_is_dead() -> None:
    script = Script()
    script.call([1, 2], [3])
    script.call([4], [5], parent=0)
    script.call([4], [5], parent=0)
    script.call([6], [7], parent=2)
    assert _kinds(script) == {1: "dead", 3: "main"}


def test_a_title_call_opens_no_window_of_the_main_line() -> None:
    script = Script()
    script.call([9, 9], [8], side=True)
    script.call([1, 2], [3])
    script.call([9, 9, 3], [8], side=True)
    script.call([4], [5], parent=1)
    script.call([7], [8], parent=3, side=True)
    assert _kinds(script) == {0: "side", 2: "side", 3: "main", 4: "side"}


def test_sub_agents_have_their_own_windows_even_when_they_fork_from_the_main_line() -> None:
    script = Script()
    script.call([1, 2], [3])
    script.call([5], [6], agent="a")
    script.call([4], [6], agent="b", parent=0)
    script.call([7], [8], agent="a", parent=1)
    script.call([7], [9], agent="a", parent=3, summary=True)
    script.call([5, 9], [6], agent="a")
    script.call([4, 4], [6], parent=0)
    assert _kinds(script) == {
        2: "sub_agent",
        3: "sub_agent",
        4: "sub_agent_summary",
        5: "sub_agent",
        6: "main",
    }
