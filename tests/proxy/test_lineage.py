"""Where calls belong, told as what real harnesses do: whose a call is, what it is for, why it forks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lineage_story import BASH, TOOLS, Story, cut, results, user

from infra.chat.messages import Message

SUMMARY = "The user wants the fox counted; so far three files were read and two foxes found in them, one to go."
MARKED = f"<analysis>\nfirst, second\n</analysis>\n\n<summary>\n{SUMMARY}\n\n\nNext: count.\n</summary>"
EXPLORE = {"prompt": "look for foxes"}
CONTINUATION = f"This session is being continued.\n{SUMMARY}\n\nNext: count.\nGo on."


def steps(story: Story, history: list[Message], count: int, **how: Any) -> list[Message]:
    """Some turns of an agent's loop; returns its history, the answer to the last turn included."""
    for number in range(count):
        turn = story.call(history, f"step {number}", ("bash", {"command": f"ls {len(story.records)}"}), **how)
        history = [*history, turn, *results(turn)]
    return history


def explained(story: Story) -> bool:
    return "unexplained" not in story.forks


def test_goes_on_in_a_plain_loop_as_one_line_of_the_root_agent() -> None:
    story = Story()
    story.call(steps(story, [user("go")], 15), "done")
    assert story.forks == [""] * 16 and set(story.agents) == {"root"}
    assert story.kinds == {15: "main"} and not story.disagreements


def test_claude_code_with_sub_agents_side_by_side_a_nested_one_and_both_compactions() -> None:
    story = Story()
    main = [user("<system-reminder>agents</system-reminder>"), user("count the foxes", joined=True)]
    two = story.call(main, "I ask two", ("task", EXPLORE), ("task", EXPLORE))  # 0
    first = story.ask([user("look for foxes")], system="sub", agent="a1", sub_agent=True)
    second = story.ask([user("look for foxes")], system="sub", agent="a2", sub_agent=True)
    for asked in (second, first):  # 1, 2
        story.answer(asked, "I look", ("task", {"prompt": "deeper"}))
    sub = [user("look for foxes"), story.notes[1][1]]
    nested = story.call([user("deeper")], "deep", system="sub", agent="b", parent="a2", sub_agent=True)  # 3
    assert nested.content == "deep"
    sub = [*sub, *results(sub[1])]
    sub = steps(story, sub, 2, system="sub", agent="a2", sub_agent=True)  # 4, 5
    asking = [*sub, user("write a summary", joined=True)]
    story.call(asking, MARKED, system="sub", agent="a2", sub_agent=True, summary=True)  # 6
    sub = [user(CONTINUATION), *sub[-2:]]
    story.call(sub, "two foxes", system="sub", agent="a2", sub_agent=True)  # 7
    story.call(
        [user("look for foxes"), story.notes[2][1], *results(story.notes[2][1])], "none", system="sub", agent="a1"
    )
    main = steps(story, [*main, two, *reversed(results(two))], 3)  # 9, 10, 11
    proactive = [*main[:-2], user("write a summary", joined=True)]
    story.call(proactive, MARKED, summary=True)  # 12
    main = steps(
        story, [user("reminder"), user(CONTINUATION, joined=True), *main[-2:], user("read files")], 4
    )  # 13 - 16
    reactive = [*main[:-4], user("write a summary", joined=True)]
    story.call(reactive, MARKED.replace("two foxes", "four foxes"), summary=True)  # 17
    story.call([user(CONTINUATION.replace("two foxes", "four foxes")), *main[-6:]], "three")  # 18

    assert story.agents[1:9] == ["root/a2", "root/a1", "root/a2/b", *["root/a2"] * 4, "root/a1"]
    assert story.forks == [
        *["", "agent", "agent", "agent", "", "", "summary", "compaction", ""],
        *["", "", "", "summary", "compaction", "", "", "", "summary", "compaction"],
    ]
    assert [place.compacts for place in story.places if place.compacts >= 0] == [6, 12, 17]
    assert not story.disagreements
    assert story.kinds == {
        3: "sub_agent",
        5: "sub_agent",
        6: "sub_agent_summary",
        7: "sub_agent",
        8: "sub_agent",
        11: "main",
        12: "main_summary",
        16: "main",
        17: "main_summary",
        18: "main",
    }


def test_the_same_episode_without_any_hint_has_the_same_agents_windows_and_kinds() -> None:
    story = Story()
    main = [user("count the foxes")]
    two = story.call(main, "I ask two", ("task", EXPLORE), ("task", EXPLORE))
    for _ in range(2):
        story.call([user("look for foxes")], "I look", ("task", {"prompt": "deeper"}), system="sub")
    story.call([user("deeper")], "deep", system="sub")
    for seq in (1, 2):
        turn = story.notes[seq][1]
        story.call([user("look for foxes"), turn, *results(turn)], "two foxes", system="sub")
    main = steps(story, [*main, two, *results(two)], 3)  # 6, 7, 8
    story.call([*main, user("write a summary")], SUMMARY)  # 9
    story.call([user(f"Summary: {SUMMARY}")], "three")  # 10
    assert story.agents[1:6] == ["root/0.0", "root/0.1", "root/0.0/1.0", "root/0.0", "root/0.1"]
    assert story.forks == ["", "agent", "agent", "agent", "", "", "", "", "", "", "compaction"]
    assert story.kinds == {3: "sub_agent", 4: "sub_agent", 5: "sub_agent", 8: "main", 9: "main_summary", 10: "main"}


def test_equal_sub_agents_in_flight_are_told_apart_by_what_is_running() -> None:
    story = Story()
    two = story.call([user("go")], "", ("task", EXPLORE), ("task", EXPLORE))
    first = story.ask([user("look for foxes")], system="sub")
    assert story.ask([user("look for foxes")], system="sub").place == first.place  # the first one failed: asked again
    second = story.ask([user("look for foxes")], system="sub", running=[first.place.agent])
    assert [first.place.agent, second.place.agent] == ["root/0.0", "root/0.1"]
    story.answer(second, "b", ("bash", {}))
    story.answer(first, "a", ("bash", {}))
    for turn in (story.notes[1][1], story.notes[2][1]):
        story.call([user("look for foxes"), turn, *results(turn)], "found", system="sub")
    story.call([user("go"), two, *results(two)], "done")
    assert story.agents == ["root", "root/0.1", "root/0.0", "root/0.1", "root/0.0", "root"] and explained(story)


def test_equal_sub_agents_that_nothing_tells_apart_still_have_a_window_each() -> None:
    story = Story()
    story.call([user("go")], "", ("task", EXPLORE), ("task", EXPLORE))
    both = [story.ask([user("look for foxes")], system="sub") for _ in range(2)]
    turns = [story.answer(asked, "I look", ("bash", {})) for asked in both]
    histories = [[user("look for foxes"), turn, *results(turn)] for turn in turns]
    histories = [steps(story, history, 1, system="sub") for history in histories]
    for history in histories:
        story.call(history, "found", system="sub")
    assert story.forks == ["", "agent", "agent", "", "", "", ""]
    assert story.kinds == {0: "main", 5: "sub_agent", 6: "sub_agent"}


def test_prompt_of_another_when_more_agents_have_it_than_calls_ask_for_it() -> None:
    story = Story()
    story.call([user("go")], "", ("task", EXPLORE))
    for system in ("sub", "another sub"):
        story.call([user("look for foxes")], "none", system=system)
    assert story.agents[1:] == ["root/0.0", "root/0.0"] and story.forks[1:] == ["agent", "agent"]


def test_prompt_of_a_tool_call_that_was_answered_may_be_of_a_sub_agent_in_the_background() -> None:
    story = Story()
    main = [user("go")]
    turn = story.call(main, "", ("task", {"items": [{"text": " look for foxes\n"}]}))
    story.call([*main, turn, *results(turn)], "I wait", ("bash", {}))
    story.call([user("look for foxes")], "none", system="sub")
    assert story.agents[-1] == "root/0.0" and story.forks[-1] == "agent"


def test_given_conversation_of_its_parent_a_sub_agent_is_an_agent_of_its_own() -> None:
    story = Story()
    main = [user("go")]
    turn = story.call(main, "", ("task", EXPLORE))
    sub = [*main, turn, *results(turn), user("look for foxes")]
    said = story.call(sub, "none", ("bash", {}), agent="/root/fox finder", sub_agent=True)
    story.call([*sub, said, *results(said)], "done", agent="/root/fox finder", sub_agent=True)
    story.call([*main, turn, *results(turn)], "done")
    assert story.agents == ["root", "root/root-fox-finder", "root/root-fox-finder", "root"]
    assert story.forks == ["", "agent", "", ""] and not story.disagreements


def test_codex_compacts_without_tools_and_its_next_window_keeps_the_users_messages() -> None:
    for hint in (True, None):
        story = Story()
        main = steps(story, [user("rules"), user("go")], 4)
        story.call([*main, user("summarise")], SUMMARY, tools=(), summary=hint)
        window = [user("rules"), user("go"), user(f"Another model says:\n{SUMMARY}")]
        story.call(steps(story, window, 2), "done")
        assert story.forks == [*[""] * 4, "summary" if hint else "opening", "compaction", "", ""]
        assert story.kinds == {3: "main", 4: "main_summary", 7: "main"}
        assert not story.disagreements


def test_asks_for_a_summary_that_comes_to_nothing_and_leaves_the_line_as_it_was() -> None:
    for tools, hint in (((), None), ((), True), (TOOLS, True)):
        story = Story()
        main = steps(story, [user("go")], 3)
        story.call([*main, user("summarise")], "", tools=tools, summary=hint)
        story.call(main, "done")
        assert story.forks[-1] == ""
        assert story.kinds == {3: "main_summary" if hint else "side", 4: "main"}


def test_a_line_that_goes_on_from_an_announced_summary_is_a_disagreement() -> None:
    story = Story()
    main = steps(story, [user("go")], 1)
    turn = story.call(main, "that was all", ("bash", {}), summary=True)
    story.call([*main, turn, *results(turn)], "done")
    assert story.forks[-1] == "" and story.kinds == {2: "main"}
    assert story.disagreements == ["the line goes on from call 1, which was announced as a summary"]


def test_a_summary_that_was_not_announced_though_others_were_is_a_disagreement() -> None:
    story = Story()
    main = steps(story, [user("go")], 2)
    story.call([*main, user("summarise")], SUMMARY, summary=True)
    main = steps(story, [user(SUMMARY)], 2)
    story.call([*main, user("summarise")], SUMMARY.upper())
    story.call([user(SUMMARY.upper())], "done")
    assert [place.compacts for place in story.places if place.compacts >= 0] == [2, 5]
    assert len(story.disagreements) == 1 and explained(story)


def test_announced_summary_counts_though_it_is_short() -> None:
    for hint, fork in ((True, "compaction"), (None, "unexplained")):
        story = Story()
        main = steps(story, [user("go")], 2)
        story.call([*main, user("summarise")], "2 foxes", summary=hint)
        story.call([user("so far: 2 foxes")], "done")
        assert story.forks[-1] == fork


def test_rewritten_summary_that_was_announced_opens_the_next_window() -> None:
    story = Story()
    main = steps(story, [user("go")], 2)
    story.call([*main, user("summarise")], SUMMARY, summary=True)
    story.call([user("title?")], "Foxes", tools=(), system="titles")
    story.call([user("as JSON: {...}"), *main[-2:]], "done")
    assert [place.compacts for place in story.places] == [-1, -1, -1, -1, 2]
    assert story.kinds == {1: "main", 2: "main_summary", 3: "side", 4: "main"}


def test_the_first_turn_of_a_new_window_may_be_dropped_too() -> None:
    for text in (SUMMARY, "2 foxes"):
        story = Story()
        main = steps(story, [user("go")], 2)
        story.call([*main, user("summarise")], text, summary=True)
        for tail in (main[-2:], []):
            again = Story(story.rebuilt(), list(story.records), list(story.notes), paths=list(story.paths))
            window = [user(f"so far: {text}"), *tail]
            again.call(window, " \n")
            again.call([*window, user("say something", joined=True)], "done")
            assert again.forks == ["compaction", "dropped"]
            assert again.kinds == {1: "main", 2: "main_summary", 3: "dead", 4: "main"}


def test_a_report_in_the_prompt_of_the_next_sub_agent_is_no_summary() -> None:
    story = Story()
    main = [user("go")]
    turn = story.call(main, "", ("task", EXPLORE))
    story.call([user("look for foxes")], SUMMARY, system="sub")
    main = [*main, turn, *results(turn, SUMMARY)]
    story.call(main, "", ("task", {"prompt": f"Check this: {SUMMARY}"}))
    story.call([user(f"Check this: {SUMMARY}")], "right", system="sub")
    assert story.agents[-1] == "root/2.0" and story.forks == ["", "agent", "", "agent"]


def test_a_report_of_an_agent_that_still_runs_is_no_summary_either() -> None:
    story = Story()
    turn = story.call([user("go")], "", ("task", EXPLORE), ("task", {"prompt": f"Check this: {SUMMARY}"}))
    story.call([user("look for foxes")], SUMMARY, system="sub")
    story.call([user(f"Check this: {SUMMARY}")], "right", system="sub")
    assert story.agents == ["root", "root/0.0", "root/0.1"]
    story.call([user("go"), turn, *results(turn)], "fine")
    story.call([user(f"Once more, as I said: {SUMMARY}")], "right", system="sub")  # nothing tells whose this is
    assert story.places[-1].compacts == -1 and story.agents[-1] == "root"


def test_the_text_of_a_turn_that_the_conversation_went_on_from_is_no_summary() -> None:
    story = Story()
    turn = story.call([user("go")], SUMMARY, ("bash", {}))
    story.call([user("go"), turn, *results(turn)], "done")
    story.call([user(f"so far: {SUMMARY}")], "done")
    assert story.places[-1].compacts == -1 and story.forks[-1] == "unexplained"


def test_a_harness_that_names_its_sub_agents_means_the_main_agent_when_it_names_none() -> None:
    story = Story()
    story.call([user("go")], "", ("task", EXPLORE))
    story.call([user("look for foxes")], SUMMARY, system="sub", agent="a1")
    story.call([user(f"so far: {SUMMARY}")], "done")
    assert story.agents == ["root", "root/a1", "root"] and story.places[-1].compacts == -1


def test_a_main_agent_that_repeats_the_prompt_of_an_answered_call_is_believed() -> None:
    story = Story()
    turn = story.call([user("go")], "", ("bash", {"command": "look for foxes"}))
    story.call([user("go"), turn, *results(turn)], "done")
    story.call([user("look for foxes")], "none", sub_agent=False)
    assert story.agents[-1] == "root" and not story.disagreements


def test_unannounced_summary_reappears_without_its_analysis_and_with_other_blanks() -> None:
    story = Story()
    main = steps(story, [user("go")], 2)
    story.call([*main, user("summarise")], MARKED)
    story.call([user(CONTINUATION)], "done")
    assert story.forks[-1] == "compaction"
    story.call([user("go on")], f"<analysis>a</analysis>{SUMMARY}")
    story.call([user(SUMMARY)], "done")
    assert story.places[-1].compacts == 4


def test_short_summaries_of_two_agents_are_told_apart_by_their_text() -> None:
    story = Story()
    main = steps(story, [user("go")], 1)
    main = [*main, story.call(main, "", ("task", EXPLORE))]
    sub = steps(story, [user("look for foxes")], 1, system="sub")
    story.call([*sub, user("summarise")], "no fox", system="sub", summary=True)
    story.call([*main, *results(main[-1]), user("summarise")], "a hen", summary=True)
    story.call([user("so far: no fox")], "done", system="sub")
    story.call([user("so far: a hen")], "done")
    assert [place.compacts for place in story.places[5:]] == [3, 4]
    assert story.agents[5:] == ["root/1.0", "root"]


def test_a_rewritten_summary_of_a_named_sub_agent_opens_its_next_window() -> None:
    story = Story()
    story.call([user("go")], "", ("task", EXPLORE))
    sub = steps(story, [user("look for foxes")], 1, system="sub", agent="a1")
    story.call([*sub, user("summarise")], SUMMARY, system="sub", agent="a1", summary=True)
    story.call([user("as JSON")], "done", system="sub", agent="a1")
    assert story.places[-1].compacts == 2 and story.agents[-1] == "root/a1"


def test_opencode_asks_for_a_title_first() -> None:
    for hint in (True, None):
        story = Story()
        story.call([user("Generate a title"), user("go")], "Foxes", tools=(), system="titles", side=hint)
        story.call(steps(story, [user('"go"')], 3), "done")
        assert story.forks == ["side" if hint else "", "agent", "", "", ""]
        assert story.kinds == {0: "side", 4: "main"}


def test_alone_without_tools_a_call_is_a_side_call() -> None:
    story = Story()
    main = steps(story, [user("go")], 2)
    side = story.call([user("is this safe?")], "yes", tools=(), system="judge")
    story.call([user("is this safe?"), side, user("why?")], "it is", tools=(), system="judge")
    story.call(main, "done")
    story.call([user("search")], "found", tools=(BASH,), system="search", side=True)
    assert story.forks == ["", "", "side", "side", "", "side"]
    assert story.kinds == {3: "side", 4: "main", 5: "side"}


def test_qwen_codes_preamble_is_no_fork() -> None:
    story = Story()
    preamble = [user("This is the folder: ..."), Message(role="assistant", content="Got it. Thanks!")]
    main = steps(story, [*preamble, user("go")], 2)
    turn = story.call(main, "", ("task", EXPLORE))
    story.call([*preamble, user("look for foxes")], "none", system="sub")
    story.call([*main, turn, *results(turn)], "done")
    assert story.forks == ["", "", "", "agent", ""]
    assert story.agents[3] == "root/2.0"


def test_turns_without_output_are_dropped() -> None:
    story = Story()
    main = steps(story, [user("go")], 2)
    story.call(main, "\n")
    more = [*main, user("say something", joined=True)]
    story.call(more, "")
    story.call([*more, user("anything", joined=True)], "done")
    assert story.forks == ["", "", "", "dropped", "dropped"]
    assert story.kinds == {2: "dead", 3: "dead", 4: "main"}


def test_the_first_turn_of_all_may_be_dropped() -> None:
    story = Story()
    story.call([user("go")], "")
    story.call([user("go"), user("say something", joined=True)], "done")
    assert story.forks == ["", "dropped"] and story.kinds == {0: "dead", 1: "main"}


def test_part_of_a_turn_comes_back_from_a_harness_killed_while_a_tool_ran() -> None:
    story = Story()
    main = steps(story, [user("go")], 2)
    turn = story.call(main, "I try", ("bash", {"command": "sleep 9"}))
    resumed = [*main, cut(turn), user("go on")]
    more = steps(story, resumed, 2)
    story.call(more, "done")
    assert story.forks == ["", "", "", "resume", "", ""]
    assert story.kinds == {2: "dead", 5: "main"}


def test_unanswered_calls_may_be_lost_by_a_harness_killed_while_a_tool_ran() -> None:
    story = Story()
    main = steps(story, [user("go")], 2)
    story.call(main, "", ("bash", {"command": "sleep 9"}))
    story.call([*main, user("go on")], "done")
    assert story.forks[-1] == "dropped" and story.kinds == {2: "dead", 3: "main"}


@pytest.mark.parametrize("answered", ["before", "after", "never"])
def test_turn_nobody_said_is_added_by_a_harness_killed_while_a_call_was_in_flight(answered: str) -> None:
    story = Story()
    main = steps(story, [user("go")], 2)
    lost = story.ask(main)
    synthetic = Message(role="assistant", content="No response requested.")
    resumed = [*main, user("interrupted", joined=True), synthetic, user("go on")]
    if answered == "before":
        story.answer(lost, "I was here")
    asked = story.ask(resumed)
    turn = story.answer(asked, "I go on", ("bash", {}))
    if answered == "after":
        story.answer(lost, "I was here")
    story.call([*resumed, turn, *results(turn)], "done")
    assert [place.fork for place in story.places if place.fork] == ["resume"]
    assert story.kinds[len(story.records) - 1] == "main" and list(story.kinds.values()).count("main") == 1


def test_changed_opening_makes_copies_of_the_turns_and_a_window_of_its_own() -> None:
    for how in ({"tools": (BASH,)}, {"system": "today is another day"}):
        story = Story()
        main = steps(story, [user("go")], 3)
        story.call(steps(story, main, 2, **how), "done", **how)
        assert story.forks == ["", "", "", "opening", "", ""]
        assert story.kinds == {2: "main", 5: "main"}


def test_same_request_once_more_is_another_sample() -> None:
    story = Story()
    main = steps(story, [user("go")], 2)
    first, second = story.call(main, "a", ("bash", {})), story.call(main, "b", ("bash", {}))
    story.call([*main, first, *results(first)], "done")
    assert story.forks == ["", "", "", "sample", "sample"]
    assert second.content == "b" and story.kinds == {3: "dead", 4: "main"}


def test_duplicates_in_flight_fork_nothing_whichever_is_used() -> None:
    for used in range(2):
        story = Story()
        main = steps(story, [user("go")], 1)
        both = [story.ask(main), story.ask(main)]
        turns = [story.answer(asked, "a", ("bash", {})) for asked in both]
        story.call([*main, turns[used], *results(turns[used])], "done")
        assert story.forks == [""] * 4
        assert story.kinds == {2 - used: "dead", 3: "main"}


def test_unexplained_is_what_nothing_explains() -> None:
    story = Story()
    main = steps(story, [user("go")], 3)
    story.call([*main[:-2], user("forget that")], "done")
    story.call([user("something else")], "done")
    edited = [user("go!"), *main[1:]]
    story.call(edited[:3], "done")
    assert story.forks[3:5] == ["unexplained", "unexplained"]


def test_a_harness_that_contradicts_the_conversation_is_heard_but_not_believed() -> None:
    story = Story()
    main = steps(story, [user("go")], 1)
    story.call(main, "", ("task", EXPLORE), agent="a1", sub_agent=True)
    story.call([user("look for foxes")], "none", system="sub", sub_agent=False)
    assert story.agents == ["root", "root", "root/1.0"]
    assert len(story.places[1].disagreements) == len(story.places[2].disagreements) == 1


def test_named_agent_is_believed_where_the_conversation_shows_nothing() -> None:
    story = Story()
    story.call([user("go")], "", ("task", EXPLORE))
    for hints in ({"agent": "a1"}, {"agent": "b", "parent": "a1"}, {"sub_agent": True}, {"agent": "3.1"}):
        story.call([user(f"wrapped: look for foxes {hints}")], "none", system="sub", **hints)
    assert story.agents[1:3] == ["root/a1", "root/a1/b"] and story.agents[4] == "root/id-3.1"
    assert story.agents[3].startswith("root/~") and story.forks[1:] == ["agent"] * 4


def test_unnamed_sub_agent_is_named_by_its_request() -> None:
    story = Story()
    steps(story, [user("go")], 1)
    for prompt in ("look", "look", "look elsewhere"):
        story.call([user(prompt)], "none", system="sub", sub_agent=True)
    first, again, other = story.agents[1:]
    assert first == again != other and first.startswith("root/~")
    assert story.forks[1:] == ["agent", "sample", "agent"]


def test_marked_side_it_is_a_side_call_though_it_has_tools_and_a_summary_in_it() -> None:
    story = Story()
    main = steps(story, [user("go")], 2)
    story.call([*main, user("summarise")], SUMMARY, summary=True)
    story.call([user(f"a title for: {SUMMARY}")], "Foxes", side=True)
    place = story.places[-1]
    assert (place.agent, place.side, place.fork, place.compacts) == ("root", True, "side", -1)
    story.call([user(f"so far: {SUMMARY}")], "done")
    assert story.forks[-1] == "compaction", "the title has not taken the summary"


def test_main_agent_has_what_shows_nothing_else() -> None:
    story = Story()
    story.call([user("go")], "I ask", ("task", EXPLORE))
    story.call([user("something else")], "done", system="another")
    assert story.agents == ["root", "root"] and story.forks == ["", "unexplained"]


def test_first_of_its_agent_only_the_first_call_of_all_forks_nothing() -> None:
    story = Story()
    story.call([user("look")], "none", system="sub", agent="a1")
    story.call([user("go")], "done")
    story.call([user("deeper")], "none", system="sub", agent="b")
    assert story.agents == ["root/a1", "root", "root/b"] and story.forks == ["agent"] * 3
    alone = Story()
    alone.call([user("go")], "done")
    assert alone.forks == [""]


def test_kept_tail_under_a_summary_opens_a_window_and_turns_after_it_do_not() -> None:
    story = Story()
    main = steps(story, [user("go")], 2)
    story.call([*main, user("summarise")], SUMMARY)
    window = [user(f"so far: {SUMMARY}"), *main[-2:]]
    turn = story.call(window, "I go on", ("bash", {}))
    assert story.forks[-1] == "compaction" and story.places[-1].compacts == 2
    story.call([*window, turn, *results(turn)], "done")
    assert story.forks[-1] == "" and story.places[-1].compacts == -1


def test_other_answer_to_the_latest_request_is_gone_on_from() -> None:
    story = Story()
    main = steps(story, [user("go")], 2)
    first, _ = story.call(main, "a", ("bash", {})), story.call(main, "b", ("bash", {}))
    story.call([*main, first, *results(first)], "done")
    assert story.forks[-1] == "sample" and story.records[-1].parent == 2


WORDS = ["", " ", "ok", SUMMARY, SUMMARY.upper(), MARKED, "look for foxes", "deeper", "done"]


def random_story(rng: random.Random, calls: int) -> Story:
    """Requests of every shape, sensible or not, some in flight together."""
    story, waiting = Story(), []
    histories: list[list[Message]] = [[user("go")]]
    for _ in range(calls):
        history = list(rng.choice(histories[-4:]))
        shape = rng.random()
        if shape < 0.15:
            history = [user(rng.choice(WORDS) or "x")]
        elif shape < 0.3 and len(history) > 2:
            history = [user(f"so far: {rng.choice(WORDS)}"), *history[rng.randrange(len(history)) :]]
        elif shape < 0.4:
            history = [*history, Message(role="assistant", content="never said"), user("go on")]
        elif shape < 0.5:
            history = [*(cut(m) if m.role == "assistant" else m for m in history), user("go on")]
        elif shape < 0.6:
            history = [*history, user("say something", joined=True)]
        if history[-1].role == "assistant":
            history.append(user("go on"))
        hints = {
            "agent": rng.choice(["", "", "", "a1", "b"]),
            "parent": rng.choice(["", "", "a1"]),
            "sub_agent": rng.choice([None, None, True, False]),
            "summary": rng.choice([None, None, None, True, False]),
            "side": rng.choice([None, None, None, None, True, False]),
        }
        waiting.append(
            (
                story.ask(
                    history,
                    system=rng.choice(["be brief", "be brief", "sub"]),
                    tools=rng.choice([TOOLS, TOOLS, TOOLS, ()]),
                    **(hints if rng.random() < 0.4 else {}),
                ),
                history,
            )
        )
        while waiting and rng.random() < 0.8:
            asked, before = waiting.pop(rng.randrange(len(waiting)))
            said = [("task", {"prompt": rng.choice(WORDS)}) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
            turn = story.answer(asked, rng.choice(WORDS), *said)
            histories.append([*before, turn, *results(turn)])
    return story


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 25))
def test_a_rebuilt_lineage_places_every_request_as_the_one_that_lived_through_the_calls(seed: int, calls: int) -> None:
    story = random_story(random.Random(seed), calls)
    rebuilt = story.rebuilt()
    for asked in story.asked:
        args = (asked.request, asked.path, asked.synthetic_after)
        assert rebuilt.place(*args) == story.lineage.place(*args)
    half = story.rebuilt(len(story.records) // 2)
    for record, noted in list(zip(story.records, story.notes, strict=True))[len(story.records) // 2 :]:
        half.observe(record, *noted)
    for asked in story.asked:
        args = (asked.request, asked.path, asked.synthetic_after)
        assert half.place(*args) == rebuilt.place(*args)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 25))
def test_whatever_is_asked_a_call_that_doesnt_fork_goes_on_from_the_latest_call_of_its_agent(
    seed: int, calls: int
) -> None:
    story = random_story(random.Random(seed), calls)
    for asked in story.asked:
        place = asked.place
        if place.fork == "" and asked.path:
            last = asked.path[-1]
            assert last.own and last.whole and not asked.synthetic_after
            assert story.records[last.seq].agent == place.agent
        if place.compacts >= 0:
            assert story.records[place.compacts].agent == place.agent
            assert all(turn.seq < place.compacts for turn in asked.path)
        assert place.agent == "root" or place.agent.startswith("root/")
        assert not (place.side and place.summary) and place.side == (place.fork == "side")
    windows = [str(kind) for kind in story.kinds.values()]
    assert len(windows) >= (1 if story.records else 0)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 5), st.integers(1, 4), st.booleans())
def test_so_many_compactions_make_one_main_path_more(compactions: int, turns: int, announced: bool) -> None:
    story = Story()
    main = steps(story, [user("go")], turns)
    for number in range(compactions):
        text = f"{SUMMARY} ({number})"
        story.call([*main, user("summarise")], text, summary=announced or None)
        main = steps(story, [user(f"so far: {text}"), *main[-2:]], turns)
    found = list(story.kinds.values())
    assert found.count("main") == compactions + 1 and found.count("main_summary") == compactions
    assert set(found) <= {"main", "main_summary"} and explained(story)
