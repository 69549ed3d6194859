"""OpenAI Chat Completions as mini-swe-agent, Qwen Code and opencode speak it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dialect_parts import TURN_ID, events, head, parse, serving, turn
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI, BadRequestError

from infra.chat.messages import Message
from proxy.conversation.requests import ModelRequest, Turn
from proxy.dialects import openai_chat
from proxy.errors import BadRequest, ContextExceeded, KeyRefused, NoCell

BASH: Any = {"type": "function", "function": {"name": "bash", "description": "Runs.", "parameters": {"type": "object"}}}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages) or [{"role": "user", "content": "go"}], **fields}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def refused(request: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(openai_chat, request)
    return caught.value


def test_a_conversation_is_read_block_by_block() -> None:
    function = {"name": "bash", "arguments": '{"a":  1}'}
    request = parse(
        openai_chat,
        body(
            {"role": "developer", "content": [part("one"), part("two")]},
            {"role": "user", "content": [part("a"), part("b")]},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None, "annotations": []}
            | {"tool_calls": [{"id": "c1", "type": "function", "function": function}], "function_call": None},
            {"role": "tool", "tool_call_id": "c1", "content": [part("x"), part("y")]},
            tools=[BASH],
            max_tokens=9,
            max_completion_tokens=8,
            stream_options={"include_usage": True},
        ),
        {"x-session-id": "ses_1"},
    )
    assert request.system == Message("system", "one\n\ntwo")
    assert [(m.content, m.joined) for m in request.messages[:2]] == [("a", False), ("b", True)]
    assistant, tool = request.messages[2:]
    assert assistant.reasoning == "hm" and assistant.tool_calls[0].arguments == '{"a":  1}' and assistant.turn_id == ""
    assert tool == Message("tool", "x\ny", tool_call_id="c1")
    assert request.max_tokens == 8 and request.include_usage and request.asked == {"x-session-id": "ses_1"}


def test_an_absent_a_null_and_an_empty_content_are_one() -> None:
    forms: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}, {"content": []}]
    spoken = [body({"role": "user", "content": "a"}, {"role": "assistant", **form}, {"role": "user"}) for form in forms]
    assert len({parse(openai_chat, request).digest for request in spoken}) == 1


def test_a_system_message_alone_is_a_message() -> None:
    request = parse(openai_chat, body({"role": "system", "content": "S"}))
    assert request.system is None and request.messages == (Message("system", "S"),)


def test_the_small_model_of_opencode_marks_a_side_call() -> None:
    assert parse(openai_chat, body(model="gyre-side")).hints.side is True
    assert parse(openai_chat, body()).hints.side is None


def test_unknown_fields_are_refused_in_openais_words() -> None:
    fault = refused(body(wizardry=1))
    assert str(fault) == "Unrecognized request argument supplied: wizardry" and fault.param == "wizardry"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"n": True},
        {"stop": "\n"},
        {"logit_bias": {"1": 5}},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"logprobs": True},
        {"modalities": ["text", "audio"]},
        {"max_tokens": -1},
        {"stream_options": 5},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "prefill"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "function", "content": "x"}]},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}, {"role": "user"}]},
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        {"model": 5},
    ],
)
def test_what_would_change_sampling_or_cannot_be_read_is_refused(fields: dict[str, Any]) -> None:
    (name,) = fields
    assert refused(body() | fields).param == name


def test_values_that_change_nothing_are_taken_and_the_rest_is_recorded() -> None:
    neutral = {"n": 1, "stop": [], "logprobs": False, "response_format": {"type": "text"}, "modalities": ["text"]}
    asked = {"temperature": 0, "reasoning_effort": "high", "parallel_tool_calls": False, "tool_choice": "auto"}
    assert parse(openai_chat, body(**neutral, **asked)).asked == asked


def test_a_stream_is_opened_pinged_and_ended() -> None:
    request = parse(openai_chat, body(stream=True, stream_options={"include_usage": True}))
    start = openai_chat.stream_start(request, head())
    rest = openai_chat.stream_turn(request, turn("Look.", "hm", [("bash", "{}")]))
    read = [data for _, data in events(start + openai_chat.PING + rest)]
    deltas = [chunk["choices"][0]["delta"] for chunk in read[:-2]]
    assert [list(delta) for delta in deltas] == [["role", "content"], ["reasoning_content", "content", "tool_calls"]]
    assert read[-3]["choices"][0]["finish_reason"] == "tool_calls"
    assert read[-2]["choices"] == [] and read[-2]["usage"]["total_tokens"] == 107 and read[-1] == "[DONE]"
    assert {chunk["id"] for chunk in read[:-1]} == {f"chatcmpl_gyre_{TURN_ID}"}


def test_a_stream_that_breaks_leaves_all_of_the_turn_or_nothing() -> None:
    """Half a turn's text looks to some harnesses like the end of the work."""
    request = parse(openai_chat, body(stream=True))
    rest = openai_chat.stream_turn(request, turn("Look.", "hm", [("bash", "{}")]))
    for end in range(len(rest)):
        whole_events = [event for event in rest[:end].split(b"\n\n")[:-1] if event != b"data: [DONE]"]
        for event in whole_events:
            choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
            assert choice["finish_reason"] == "tool_calls" and choice["delta"]["tool_calls"]


@pytest.mark.parametrize(
    ("finish", "uses", "reason"),
    [
        ("stop", [], "stop"),
        ("stop", [("bash", "{}")], "tool_calls"),
        ("length", [], "length"),
        ("context", [], "length"),
    ],
)
def test_finish_reasons(finish: str, uses: list[tuple[str, str]], reason: str) -> None:
    whole = json.loads(openai_chat.response(parse(openai_chat, body()), turn("x", calls=uses, finish=finish)))
    assert whole["choices"][0]["finish_reason"] == reason


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
calls = st.lists(st.tuples(words, st.dictionaries(words, words, max_size=3).map(json.dumps)), max_size=3)


@given(words, words, calls)
def test_a_turn_that_is_sent_back_is_the_turn_that_was_sent(
    content: str, reasoning: str, uses: list[tuple[str, str]]
) -> None:
    spoken = turn(content, reasoning, uses)
    echoed = json.loads(openai_chat.response(parse(openai_chat, body()), spoken))["choices"][0]["message"]
    go = {"role": "user", "content": "go"}
    read = parse(openai_chat, body(go, echoed, {"role": "user", "content": "on"})).messages[1]
    assert (read.content, read.reasoning, read.tool_calls) == (content, reasoning, spoken.message.tool_calls)


@pytest.mark.parametrize(
    ("fault", "status", "code", "words_of_it"),
    [
        (ContextExceeded(10, 20), 400, "context_length_exceeded", "maximum context length is 10 tokens"),
        (KeyRefused("unknown"), 400, "invalid_api_key", "Incorrect API key provided"),
        (NoCell("held"), 503, "no_cell", "held"),
    ],
)
def test_refusals_are_in_openais_words(fault: Any, status: int, code: str, words_of_it: str) -> None:
    whole = json.loads(openai_chat.error(fault))
    assert fault.status == status
    assert whole["error"]["code"] == code and words_of_it in whole["error"]["message"]
    assert events(openai_chat.stream_error(fault)) == [("", whole)]


async def test_openais_own_client_reads_answers_and_streams() -> None:
    def script(request: ModelRequest, number: int) -> Turn:
        if number == 2:
            raise ContextExceeded(10, 20)
        return turn("Look.", "hm", [("bash", '{"command": "ls"}')])

    asks: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    async with (
        serving(script) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
    ):
        whole = await client.chat.completions.create(**asks)
        async with client.chat.completions.stream(**asks, stream_options={"include_usage": True}) as stream:
            final = await stream.get_final_completion()
        with pytest.raises(BadRequestError, match="maximum context length is 10"):
            await client.chat.completions.create(**asks)
    for completion in (whole, final):
        message = completion.choices[0].message
        assert message.content == "Look." and message.tool_calls
        assert message.tool_calls[0].function.arguments == '{"command": "ls"}'
        assert completion.usage is not None and completion.usage.total_tokens == 107
