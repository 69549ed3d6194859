"""Reading sampled turns: calls, reasoning, text, and cuts that are exact in tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_parts import MARKS
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.chat.chatml import ChatML
from infra.chat.qwen3 import Qwen3Renderer
from infra.chat.smollm2 import SmolLM2Renderer

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
IM_END = 2
OTHER = '<tool_call>{"name": "é", "arguments": {"x": "漢"}} </tool_call>'
ODD = '{"name": "f", "arguments": {"x": "</tool_call>"}}'
pieces = st.lists(
    st.sampled_from([*MARKS, CALL, OTHER, ODD, "\n", "\n\n", ".\n", " ", "é", "漢", "a.", "{", '{"name": "b"}']),
    max_size=8,
)
noises = st.lists(st.integers(0, 559).filter(lambda token: token != IM_END), max_size=4)


def sampled(renderer: ChatML, text: str) -> list[int]:
    """Ids as a policy may sample them: marks as tokens where there are such."""
    return list(renderer.tokenizer.encode(text, add_special_tokens=False).ids)


@given(pieces, noises, st.booleans(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_turn_that_is_cut_reads_as_the_same_first_blocks(
    renderer: ChatML, spelled: list[str], noise: list[int], ended: bool, data: st.DataObject
) -> None:
    ids = sampled(renderer, "".join(spelled))
    at = data.draw(st.integers(0, len(ids)))
    ids = [*ids[:at], *noise, *ids[at:]]
    turn = renderer.parse(ids + [renderer.im_end] * ended)
    assert renderer.im_end == IM_END
    assert len(turn.cuts) == len(turn.calls) + 1
    assert turn.cuts[-1] == len(ids)
    for count, cut in enumerate(turn.cuts):
        if cut is not None:
            part = renderer.parse(ids[:cut])
            assert (part.content, part.reasoning, part.calls) == (turn.content, turn.reasoning, turn.calls[:count])
    places = [cut for cut in turn.cuts if cut is not None]
    assert places == sorted(places)


@given(pieces, noises)
@settings(max_examples=100, deadline=None)
def test_the_text_of_a_turn_is_all_that_is_no_call(renderer: ChatML, spelled: list[str], noise: list[int]) -> None:
    ids = [*sampled(renderer, "".join(spelled)), *noise]
    turn, whole = renderer.parse([*ids, renderer.im_end]), renderer.decode(ids)
    if not turn.calls and not turn.reasoning and not whole.startswith("<think>"):
        assert turn.content == whole.strip("\n")
    if "\ufffd" not in whole:
        characters = iter(whole)
        assert all(character in characters for character in turn.content)


def test_parallel_calls_are_cut_between_them(renderer: ChatML) -> None:
    ids = sampled(renderer, f"<think>\nhm\n</think>\n\nLet me look.\n{CALL}\n{OTHER}\n{CALL}<|im_end|>")
    turn = renderer.parse(ids)
    assert (turn.content, turn.reasoning, len(turn.calls)) == ("Let me look.", "hm", 3)
    spelled = [renderer.decode(ids[:cut]) for cut in turn.cuts if cut is not None]
    assert spelled[0].rstrip("\n") == "<think>\nhm\n</think>\n\nLet me look."
    assert spelled[1].endswith("</tool_call>") and spelled[-1].endswith("</tool_call>")
    assert None not in turn.cuts


@pytest.mark.parametrize("as_tokens", [True, False])
def test_a_mark_inside_a_string_does_not_end_a_call(renderer: ChatML, as_tokens: bool) -> None:
    body = json.dumps({"name": "write", "arguments": {"text": "</tool_call>\n<tool_call>"}})
    inside = sampled(renderer, body) if as_tokens else renderer.text(body)
    ids = [*sampled(renderer, "<tool_call>"), *inside, *sampled(renderer, "</tool_call>")]
    turn = renderer.parse(ids)
    assert json.loads(turn.calls[0].arguments) == {"text": "</tool_call>\n<tool_call>"}
    assert not turn.content and not turn.malformed and turn.cuts == (0, len(ids))


def test_line_breaks_between_calls_belong_to_no_cut(renderer: ChatML) -> None:
    call = sampled(renderer, CALL)
    newline = renderer.text("\n")
    turn = renderer.parse([*newline, *call, *newline, *newline, *call, *newline, renderer.im_end])
    assert turn.cuts == (0, len(call) + 1, 2 * len(call) + 4)


def test_text_after_a_call_leaves_no_cut_before_it(renderer: ChatML) -> None:
    call = sampled(renderer, CALL)
    turn = renderer.parse([*renderer.text("one"), *call, *renderer.text(" two"), *call])
    assert turn.content == "one two"
    assert turn.cuts[:2] == (None, None) and turn.cuts[2] is not None


def test_a_token_that_spans_two_calls_leaves_no_cut_between_them(smol: SmolLM2Renderer) -> None:
    head, tail = CALL[:-1], CALL[1:]
    both = "><"
    if smol.tokenizer.token_to_id(both) is None:
        pytest.skip("the small vocabulary has no such token")
    turn = smol.parse([*smol.text(head), smol.tokenizer.token_to_id(both), *smol.text(tail)])
    assert len(turn.calls) == 2 and turn.cuts[1] is None


def test_marks_that_are_spelled_in_text_tokens_are_no_call_of_qwen(qwen: Qwen3Renderer) -> None:
    turn = qwen.parse(qwen.text(CALL))
    assert not turn.calls and turn.content == CALL


@pytest.mark.parametrize(
    "span",
    [
        "not json",
        '{"name": 3}',
        '{"name": "a", "arguments": NaN}',
        '{"name": "a", "arguments": {"x": Infinity}}',
        '{"name": "a", "arguments": {"x": 1e999}}',
        '{"name": "a", "arguments": ' + '{"x":' * 20_000 + "1" + "}" * 20_001,
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "a", "arguments": {}} and more',
    ],
)
def test_malformed_calls_stay_text(renderer: ChatML, span: str) -> None:
    turn = renderer.parse(sampled(renderer, f"hi<tool_call>{span}</tool_call><|im_end|>"))
    assert turn.calls == () and turn.malformed == 1
    assert turn.content == f"hi<tool_call>{span}</tool_call>"


def test_sampled_surrogate_escapes_can_be_sent(renderer: ChatML) -> None:
    (call,) = renderer.parse(
        sampled(renderer, '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>')
    ).calls
    call.arguments.encode()
    assert json.loads(call.arguments) == {"x": "\ud800"}


@pytest.mark.parametrize("repeated", ["<tool_call>", '<tool_call>{"a": "', "<tool_call>[[", "\n", "<think>"])
def test_a_degenerate_turn_is_read_in_linear_time(renderer: ChatML, repeated: str) -> None:
    ids = sampled(renderer, repeated) * 10_000
    turn = renderer.parse([*ids, *sampled(renderer, "</tool_call>"), renderer.im_end])
    assert not turn.calls and turn.cuts[-1] == len(ids) + len(sampled(renderer, "</tool_call>"))


@given(st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)), st.lists, max_leaves=4))
@settings(deadline=None)
def test_arguments_survive_as_values(renderer: ChatML, value: Any) -> None:
    body = json.dumps({"name": "f", "arguments": {"value": value}})
    ids = sampled(renderer, "<tool_call>\n") + renderer.text(body) + sampled(renderer, "\n</tool_call>")
    (call,) = renderer.parse(ids).calls
    assert json.loads(call.arguments) == {"value": value}


def test_an_id_beyond_the_vocabulary_is_no_text(renderer: ChatML) -> None:
    turn = renderer.parse([*renderer.text("a"), renderer.vocab_size + 5, renderer.im_end])
    assert turn.content == "a" and turn.cuts == (2,)
