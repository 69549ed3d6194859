"""What the leaves of an episode are, told as stories of real harnesses."""

from __future__ import annotations

import time

from hypothesis import given, settings
from trajectory_reference import Script, kinds, scripts

from trajectory.kinds import classify


def _kinds(script: Script) -> dict[int, str]:
    return {leaf.seq: str(leaf.kind) for leaf in classify(script.records)}


@settings(max_examples=500, deadline=None)
@given(scripts(14))
def test_kinds_of_random_episodes_are_those_of_the_reference(script: Script) -> None:
    assert _kinds(script) == kinds(script.records)


@settings(max_examples=500, deadline=None)
@given(scripts(14, told=True))
def test_kinds_of_random_episodes_whose_records_tell_why_they_fork_are_those_of_the_reference(script: Script) -> None:
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


def test_a_confirmed_summary_needs_no_announcement() -> None:
    script = Script()
    script.call([1, 2], [3])
    script.call([4], [5], parent=0)
    script.call([6], [7], parent=0, fork="unexplained")  # it leaves out the last turn, which the next window keeps
    script.call([1, 8, 4, 5], [9], fork="compaction", compacts=2)
    script.call([4], [9], parent=3)
    assert _kinds(script) == {1: "main", 2: "main_summary", 4: "main"}


def test_an_announced_summary_that_came_to_nothing_is_still_a_summary() -> None:
    script = Script()
    script.call([1, 2], [3])
    script.call([6], [7], parent=0, summary=True, fork="summary")
    assert _kinds(script) == {0: "main", 1: "main_summary"}


def test_a_window_whose_first_turn_was_dropped_is_one_window() -> None:
    for kept in (0, 2):
        script = Script()
        script.call([1, 2], [3])
        script.call([6], [7], parent=0, summary=True, fork="summary")
        script.call([1, 8, 4], [9], fork="compaction", compacts=1)
        script.call([1, 8, 5], [9], parent=2 if kept else -1, kept=kept, fork="dropped", compacts=1)
        script.call([4], [9], parent=3)
        assert _kinds(script) == {0: "main", 1: "main_summary", 2: "dead", 4: "main"}


def test_a_compaction_that_keeps_the_first_turns_opens_a_window_though_tokens_look_like_a_dropped_turn() -> None:
    script = Script()
    script.call([1, 2], [3])
    script.call([4], [5], parent=0)
    script.call([6], [7], parent=1, fork="summary", summary=True)
    script.call([8], [9], parent=0, fork="compaction", compacts=2)
    assert _kinds(script) == {1: "main", 2: "main_summary", 3: "main"}


def test_a_summary_does_not_make_a_window_of_what_was_dropped_or_resumed_after_it() -> None:
    for fork in ("dropped", "resume"):
        script = Script()
        script.call([1, 2], [3])
        script.call([4], [5], parent=0)
        script.call([6], [7], parent=1, fork="summary", summary=True)
        script.call([8], [9], parent=0, fork=fork)
        assert _kinds(script) == {1: "dead", 2: "main_summary", 3: "main"}


def test_codex_summary_without_tools_is_the_roots_when_confirmed_and_a_side_call_otherwise() -> None:
    for compacts in (2, -1):
        script = Script()
        script.call([1, 2], [3])
        script.call([4], [5], parent=0)
        script.call([9, 2, 3, 4, 5, 6], [7], fork="opening", tools=False)
        if compacts >= 0:
            script.call([1, 7], [9], parent=0, kept=1, fork="compaction", compacts=compacts)
            assert _kinds(script) == {1: "main", 2: "main_summary", 3: "main"}
        else:
            script.call([4], [9], parent=1)
            assert _kinds(script) == {2: "side", 3: "main"}


def test_a_title_that_nobody_recognised_is_a_side_call_where_other_calls_have_tools() -> None:
    for others in (True, False):
        script = Script()
        script.call([9, 2], [3], tools=False)
        script.call([1, 2], [3], fork="agent", tools=others)
        script.call([4], [5], parent=1, tools=others)
        assert _kinds(script) == {0: "side" if others else "main", 2: "main"}


def test_a_conversation_that_loses_its_tools_is_no_side_call() -> None:
    script = Script()
    script.call([1, 2], [3])
    script.call([9, 2, 3], [4], fork="opening", tools=False)
    script.call([5], [6], parent=1, tools=False)
    assert _kinds(script) == {0: "main", 2: "main"}


def test_two_agents_of_one_name_with_equal_prompts_have_a_window_each() -> None:
    script = Script()
    script.call([1, 2], [3])
    script.call([5], [6], agent="root/0.0", fork="agent")
    script.call([], [7], agent="root/0.0", parent=1, kept=1, fork="agent")
    script.call([4], [8], agent="root/0.0", parent=1)
    assert _kinds(script) == {0: "main", 2: "sub_agent", 3: "sub_agent"}


def test_a_thousand_calls_are_classified_in_a_moment() -> None:
    script = Script()
    for i in range(3000):
        script.call([1], [2], parent=i - 1, summary=i % 50 == 49, compacts=i - 1 if i and i % 50 == 0 else -1)
    begun = time.perf_counter()
    assert len(classify(script.records)) == 120
    assert time.perf_counter() - begun < 0.5
