"""The ChatML renderer and the ledger, by properties."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_parts import SPECIAL, SPECIAL_IDS

from infra.chat.messages import Message, Tool, ToolCall
from infra.chat.renderer import ChatMLRenderer
from proxy.ledger import Ledger, Plan

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.lists(st.sampled_from([*SPECIAL, "\n", " ", "a", "{}"]), max_size=5).map("".join),
)


def encode(renderer: ChatMLRenderer, text: str) -> list[int]:
    return list(renderer.tokenizer.encode(text, add_special_tokens=False).ids)


def test_rendering_leaves_the_renderer_as_it_was(renderer: ChatMLRenderer) -> None:
    tool, assistant = Message(role="tool", content="x"), Message(role="assistant")
    first = renderer.message(assistant, tool, closed=True)
    assert renderer.message(assistant, tool, closed=True) == first


@pytest.mark.parametrize(
    "span",
    [
        "not json",
        '{"name": 3}',
        '{"name": "a", "arguments": NaN}',
        '{"name": "a", "arguments": {"x": Infinity}}',
        '{"name": "a", "arguments": ' + '{"x":' * 20_000 + "1" + "}" * 20_001,
        '{"name": "\\ud800", "arguments": {}}',
    ],
)
def test_malformed_calls_stay_text(renderer: ChatMLRenderer, span: str) -> None:
    turn = renderer.parse(encode(renderer, f"hi<tool_call>{span}</tool_call><|im_end|>"))
    assert turn.calls == () and turn.malformed == 1
    assert turn.content == f"hi<tool_call>{span}</tool_call>"


def test_sampled_surrogate_escapes_can_be_sent(renderer: ChatMLRenderer) -> None:
    (call,) = renderer.parse(
        encode(renderer, '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>')
    ).calls
    call.arguments.encode()
    assert json.loads(call.arguments) == {"x": "\ud800"}


def test_a_degenerate_turn_is_read_in_linear_time(renderer: ChatMLRenderer) -> None:
    turn = renderer.parse([renderer.call_open] * 30_000 + [renderer.call_close, renderer.im_end])
    assert turn.malformed == 30_000 and not turn.calls


def test_turns_that_differ_only_in_their_reasoning_are_different(renderer: ChatMLRenderer) -> None:
    ledger, user = Ledger(renderer), Message(role="user", content="go")
    prompts = [
        ledger.plan([user, Message(role="assistant", content="a", reasoning=reasoning), user], ()).prompt
        for reasoning in ("one", "two", "")
    ]
    assert len({prompt.tobytes() for prompt in prompts}) == 3


@given(st.lists(st.tuples(st.sampled_from(["user", "tool", "assistant", "system"]), texts), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_no_text_ever_becomes_a_special_token(renderer: ChatMLRenderer, turns: list[tuple[Any, str]]) -> None:
    special = sum(token in SPECIAL_IDS for token in renderer.text("".join(text for _, text in turns)))
    assert special == 0
    messages = [Message(role=role, content=text) for role, text in turns]
    blank = [Message(role=role, content="x" if text else "") for role, text in turns]
    counts = []
    for some in (messages, blank):
        plan = Ledger(renderer).plan(some, (Tool(name="t"),))
        counts.append(sum(token in SPECIAL_IDS for token in plan.prompt))
    assert counts[0] == counts[1]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_plans_only_ever_grow_at_the_end(renderer: ChatMLRenderer, data: st.DataObject) -> None:
    """Whatever is said, and however the harness rewrites it, each prompt extends the call before it."""
    ledger, messages = Ledger(renderer), [Message(role="user", content=data.draw(texts))]
    before: list[int] = []
    for number in range(data.draw(st.integers(1, 5))):
        plan: Plan = ledger.plan(messages, ())
        prompt = plan.prompt.tolist()
        assert prompt[: len(before)] == before
        delta = ledger.delta(plan)
        assert delta.kept == len(before) and delta.prompt_ids.tolist() == prompt[len(before) :]
        output = encode(renderer, data.draw(texts)) + data.draw(st.sampled_from([[], [renderer.im_end]]))
        calls = (ToolCall(id=f"id{number}", name="bash", arguments=json.dumps({"a": data.draw(texts)})),)
        message = Message(role="assistant", content=data.draw(texts), tool_calls=calls)
        ledger.commit(plan, message, plan.prompt[:0] + type(plan.prompt)("i", output))
        before = prompt + output
        rewritten = data.draw(texts)
        sent = message.model_copy(update={"content": rewritten}) if data.draw(st.booleans()) else message
        messages += [sent, Message(role="tool", tool_call_id=f"id{number}", content=data.draw(texts))]
    assert sum(len(turn.ids) - turn.header for turn in ledger.turns) <= len(before)
