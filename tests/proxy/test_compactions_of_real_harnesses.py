"""Two compactions as they were seen from real harnesses: where the marks stand, and what is asked aside."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lineage_story import Story, results, user

from proxy.dialects import anthropic

MARK = {"cache_control": {"type": "ephemeral"}}


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text, **more}]}


@pytest.mark.parametrize(
    ("messages", "summary"),
    [
        ([said("user", "go"), said("assistant", "one"), said("user", "on", **MARK)], False),
        ([said("user", "go"), said("assistant", "one", **MARK), said("user", "write a summary")], True),
        (
            [
                said("user", "go"),
                said("assistant", "one", **MARK),
                said("user", "write a summary"),
                {"role": "system", "content": "The task tools haven't been used recently."},
            ],
            True,
        ),
        ([said("user", "go"), said("assistant", "one"), said("user", "on")], None),
    ],
    ids=["the loop", "a summary", "a summary with a reminder behind it", "no marks"],
)
def test_claude_code_marks_where_it_will_go_on(messages: list[dict[str, Any]], summary: bool | None) -> None:
    body = {"model": "m", "max_tokens": 100, "messages": messages}
    assert anthropic.parse(json.dumps(body).encode(), {}).hints.summary is summary


def test_qwen_code_asks_for_a_summary_of_the_first_part_under_another_system_text_without_tools() -> None:
    story = Story()
    history = [user("go")]
    for number in range(4):
        turn = story.call(history, f"step {number}", ("bash", {"command": f"ls {number}"}))
        history = [*history, turn, *results(turn)]
    snapshot = "<state_snapshot>The fox was counted in three files, one is left to be read.</state_snapshot>"
    story.call([*history[:5], user("Generate the snapshot.")], snapshot, system="you summarise", tools=())
    story.call([user("go"), user(snapshot), *history[5:]], "done")
    assert story.forks[-2:] == ["opening", "compaction"]
    assert story.kinds == {3: "main", 4: "main_summary", 5: "main"}
