"""OpenAI Responses as codex speaks it: what is read, what is refused, and what a stream looks like."""

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
from proxy.dialects import openai_responses
from proxy.dialects.openai_responses_request import FREEFORM
from proxy.errors import BadRequest, ContextExceeded, KeyRefused, NoCell

EXEC = {"type": "function", "name": "exec_command", "description": "Runs.", "parameters": {"type": "object"}}
SPAWN = {"type": "function", "name": "spawn_agent", "description": "Starts.", "strict": False, "parameters": {}}
AGENTS = {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [SPAWN]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": GRAMMAR}
SEARCH = {"type": "web_search", "external_web_access": True}
OTHER = "Z" * 24


def item(role: str, *texts: str, **more: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts], **more}


def body(*items: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": list(items) or [item("user", "go")], "store": False, **fields}


def call(identity: str, name: str = "exec_command", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": identity, "name": name, "arguments": arguments, **more}


def output(identity: str, said: Any, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": identity, "output": said}


def refused(request: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(openai_responses, request)
    return caught.value


def metadata(**said: Any) -> dict[str, str]:
    whole = {"session_id": "s", "thread_id": "s", "agent_name": "/root", "request_kind": "turn", **said}
    return {"x-codex-turn-metadata": json.dumps(whole), "x-codex-window-id": "s:0"}


# --- reading ------------------------------------------------------------------------------------------------------


def test_a_request_of_codex_is_read_whole() -> None:
    request = parse(
        openai_responses,
        body(
            item("developer", "You are codex.", id="msg_1072ac7b-06c4-5974-8bfb-78667abe6843"),
            item("developer", "skills", "permissions"),
            item("user", "go"),
            {"type": "reasoning", "id": f"rs_gyre_{TURN_ID}", "summary": [], "encrypted_content": f"gyre_{TURN_ID}"}
            | {"content": [{"type": "reasoning_text", "text": "hm"}]},
            item("assistant", "Look.", id=f"msg_gyre_{TURN_ID}", status="completed"),
            call("c1", "spawn_agent", '{"a":  1}', namespace="multi_agent_v1", id=f"fc_gyre_{TURN_ID}.0"),
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
            output("c1", "one"),
            output(
                "c2",
                [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
                "custom_tool_call_output",
            ),
            tools=[EXEC, AGENTS, PATCH, SEARCH],
            tool_choice="auto",
            parallel_tool_calls=True,
            reasoning={"summary": "auto"},
            include=["reasoning.encrypted_content"],
            prompt_cache_key="s",
            client_metadata={"session_id": "s"},
            stream=True,
        ),
        metadata(),
    )
    assert request.system == Message("system", "You are codex.")
    skills, permissions, prompt, assistant, one, two = request.messages
    assert skills.role == "system" and not skills.joined and permissions.joined and prompt.content == "go"
    assert (assistant.reasoning, assistant.content, assistant.turn_id) == ("hm", "Look.", TURN_ID)
    assert [(c.id, c.name, c.arguments) for c in assistant.tool_calls] == [
        ("c1", "multi_agent_v1.spawn_agent", '{"a":  1}'),
        ("c2", "apply_patch", '{"input": "*** Begin"}'),
    ]
    assert one == Message("tool", "one", tool_call_id="c1") and two.content == "a\nb" and not two.joined
    assert [tool.name for tool in request.tools] == ["exec_command", "multi_agent_v1.spawn_agent", "apply_patch"]
    assert request.tools[2].parameters == FREEFORM and "start: x" in request.tools[2].description
    assert request.asked["tools"] == [SEARCH] and request.asked["reasoning"] == {"summary": "auto"}
    assert request.hints.sub_agent is False and request.hints.summary is False and request.hints.side is None


def test_a_string_is_one_user_message_and_instructions_open_the_conversation() -> None:
    request = parse(openai_responses, {"input": "go", "instructions": "S"})
    assert request.messages == (Message("user", "go"),) and request.system == Message("system", "S")
    easy = parse(openai_responses, {"input": [{"role": "user", "content": "go"}], "instructions": "S"})
    assert easy.digest == request.digest
    alone = parse(openai_responses, {"input": [item("developer", "only")]})
    assert alone.system is None and alone.messages == (Message("system", "only"),)


def test_turns_that_follow_each_other_are_told_apart_by_their_ids() -> None:
    one, two = item("assistant", "a", id=f"msg_gyre_{TURN_ID}"), item("assistant", "b", id=f"msg_gyre_{OTHER}")
    read = parse(openai_responses, body(item("user", "go"), one, two, item("user", "on"))).messages
    assert [(m.content, m.turn_id) for m in read[1:3]] == [("a", TURN_ID), ("b", OTHER)]


def test_the_beginning_of_a_turn_that_broke_off_is_asked_for_with_the_rest() -> None:
    """codex keeps the items that it got before a connection broke, and sends them along when it asks again."""
    begun = [
        {"type": "reasoning", "id": f"rs_gyre_{TURN_ID}", "summary": []}
        | {"content": [{"type": "reasoning_text", "text": "hm"}]},
        item("assistant", "Look.", id=f"msg_gyre_{TURN_ID}", status="completed"),
    ]
    first = parse(openai_responses, body(item("user", "go"), stream=True))
    again = parse(openai_responses, body(item("user", "go"), *begun, stream=True))
    assert again.digest == first.digest and again.begun is not None and again.begun.turn_id == TURN_ID
    said = turn("Look.", "hm", [("exec_command", "{}")])
    sent = [data for kind, data in events(openai_responses.stream_turn(again, said))]
    done = [data["item"]["type"] for data in sent if data.get("type") == "response.output_item.done"]
    assert done == ["function_call"]


def test_reasoning_is_taken_from_its_summary_where_its_content_is_gone() -> None:
    thought = {"type": "reasoning", "id": "x", "summary": [{"type": "summary_text", "text": "hm"}], "content": None}
    read = parse(openai_responses, body(item("user", "go"), thought, call("c"), output("c", ""))).messages[1]
    assert read.reasoning == "hm" and read.turn_id == ""


@pytest.mark.parametrize(
    ("said", "agent", "parent", "sub_agent", "summary"),
    [
        ({}, "", "", False, False),
        ({"request_kind": "compaction"}, "", "", False, True),
        ({"request_kind": "other"}, "", "", False, None),
        ({"thread_id": "t", "parent_thread_id": "s", "subagent_kind": "thread_spawn"}, "t", "", True, False),
        ({"thread_id": "u", "parent_thread_id": "t", "thread_source": "subagent"}, "u", "t", True, False),
        ({"thread_id": "t", "agent_name": "/root/helper"}, "t", "", True, False),
    ],
)
def test_codex_says_who_asks_and_whether_it_compacts(
    said: dict[str, str], agent: str, parent: str, sub_agent: bool, summary: bool | None
) -> None:
    hints = parse(openai_responses, body(), metadata(**said)).hints
    assert (hints.agent, hints.parent, hints.sub_agent, hints.summary) == (agent, parent, sub_agent, summary)


@pytest.mark.parametrize("written", ["", "{", "[]", "5", "[" * 5000])
def test_metadata_that_cannot_be_read_says_nothing(written: str) -> None:
    assert parse(openai_responses, body(), {"x-codex-turn-metadata": written}).hints.sub_agent is None


def test_a_request_is_the_same_whether_it_is_the_first_or_a_retry() -> None:
    one = parse(openai_responses, body(client_metadata={"a": "1", "b": "2"}), metadata())
    two = parse(openai_responses, body(client_metadata={"b": "2", "a": "1"}), metadata())
    assert one.digest == two.digest


def test_hosted_tools_alone_make_a_side_call() -> None:
    assert parse(openai_responses, body(tools=[SEARCH])).hints.side is True
    assert parse(openai_responses, body(model="gyre-side")).hints.side is True
    assert parse(openai_responses, body(tools=[])).hints.side is None


# --- refusing -----------------------------------------------------------------------------------------------------


def test_unknown_fields_are_refused_in_openais_words() -> None:
    fault = refused(body(wizardry=1))
    assert str(fault) == "Unknown parameter: 'wizardry'." and fault.param == "wizardry"


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"previous_response_id": "resp_1"},
        {"conversation": "c"},
        {"background": True},
        {"truncation": "auto"},
        {"prompt": {"id": "p"}},
        {"context_management": [{"type": "compaction"}]},
        {"top_logprobs": 3},
        {"include": ["message.output_text.logprobs"]},
        {"include": "reasoning.encrypted_content"},
        {"text": {"format": {"type": "json_object"}}},
        {"text": "x"},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "x"}},
        {"max_output_tokens": 0},
        {"stream": 1},
        {"instructions": 5},
        {"input": []},
        {"input": None},
        {"input": [5]},
        {"input": [item("user", "a"), item("assistant", "prefill")]},
        {"input": [item("wizard", "a")]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "local_shell_call", "call_id": "x"}]},
        {"input": [output("c", [{"type": "input_image", "image_url": "x"}])]},
        {"input": [call("c", namespace=5), output("c", "")]},
        {"tools": [{"type": "function", "name": "a.b"}]},
        {"tools": [{"type": "local_shell"}]},
        {"tools": [{"type": "namespace", "name": "n"}]},
        {"tools": [{"type": "namespace", "name": "n", "tools": [AGENTS]}]},
    ],
)
def test_what_would_change_sampling_or_cannot_be_read_is_refused(fields: dict[str, Any]) -> None:
    (name,) = fields
    assert refused(body() | fields).param == name


def test_values_that_change_nothing_are_taken() -> None:
    neutral = {"truncation": "disabled", "background": False, "top_logprobs": 0, "previous_response_id": None}
    assert parse(openai_responses, body(text={"format": {"type": "text"}, "verbosity": "low"}, **neutral)).messages


# --- answering ----------------------------------------------------------------------------------------------------


def test_a_stream_has_the_order_that_codex_takes() -> None:
    request = parse(openai_responses, body(tools=[EXEC, PATCH, AGENTS], include=["reasoning.encrypted_content"]))
    uses = [
        ("exec_command", '{"cmd": "ls"}'),
        ("apply_patch", '{"input": "*** Begin"}'),
        ("multi_agent_v1.spawn_agent", "{}"),
    ]
    spoken = turn("Look.", "hm", uses)
    start = events(openai_responses.stream_start(request, head()))
    rest = events(openai_responses.stream_turn(request, spoken))
    assert [name for name, _ in start] == ["response.created", "response.in_progress"]
    assert [name.removeprefix("response.") for name, _ in rest] == [
        "output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [data["sequence_number"] for _, data in start + rest] == list(range(len(start + rest)))
    assert all(name == data["type"] for name, data in start + rest)
    whole = rest[-1][1]["response"]
    assert whole == json.loads(openai_responses.response(request, spoken))
    assert whole["output"] == [data["item"] for name, data in rest if name.endswith("item.done")]
    reasoning, message, _, patch, spawn = whole["output"]
    assert reasoning["encrypted_content"] == f"gyre_{TURN_ID}" and message["content"][0]["text"] == "Look."
    assert patch["type"] == "custom_tool_call" and patch["input"] == "*** Begin"
    assert (spawn["namespace"], spawn["name"]) == ("multi_agent_v1", "spawn_agent")
    assert whole["usage"]["input_tokens"] == 100 and whole["usage"]["total_tokens"] == 107


def test_a_ping_is_an_event_and_no_comment() -> None:
    ((name, data),) = events(openai_responses.PING)
    assert name == data["type"] == "response.in_progress"


def test_encrypted_content_is_given_only_where_it_is_asked_for() -> None:
    (reasoning, _) = json.loads(openai_responses.response(parse(openai_responses, body()), turn("x", "hm")))["output"]
    assert "encrypted_content" not in reasoning


def test_a_call_of_a_custom_tool_without_an_input_gives_what_was_said() -> None:
    request = parse(openai_responses, body(tools=[PATCH]))
    whole = json.loads(openai_responses.response(request, turn(calls=[("apply_patch", '{"patch": "x"}')])))
    assert whole["output"][0]["input"] == '{"patch": "x"}'


def test_a_call_of_a_tool_that_is_not_there_keeps_its_name() -> None:
    whole = json.loads(openai_responses.response(parse(openai_responses, body()), turn(calls=[("a.b", "{}")])))
    assert whole["output"][0]["name"] == "a.b" and "namespace" not in whole["output"][0]


@pytest.mark.parametrize("finish", ["length", "context"])
def test_a_turn_that_was_cut_is_incomplete(finish: str) -> None:
    request = parse(openai_responses, body())
    name, data = events(openai_responses.stream_turn(request, turn("x", finish=finish)))[-1]
    assert name == "response.incomplete" and data["response"]["status"] == "incomplete"
    assert data["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.sampled_from(["exec_command", "multi_agent_v1.spawn_agent", "unknown"])
calls = st.one_of(
    st.tuples(names, st.dictionaries(words, words, max_size=3).map(json.dumps)),
    words.map(lambda patch: ("apply_patch", json.dumps({"input": patch}))),
)


@given(words, words, st.lists(calls, max_size=3))
def test_a_turn_that_is_sent_back_is_the_turn_that_was_sent(
    content: str, reasoning: str, uses: list[tuple[str, str]]
) -> None:
    request = parse(openai_responses, body(tools=[EXEC, PATCH, AGENTS]))
    spoken = turn(content, reasoning, uses)
    items = [
        data["item"] for name, data in events(openai_responses.stream_turn(request, spoken)) if "item.done" in name
    ]
    echoed = [{k: v for k, v in item.items() if k != "status"} for item in items]  # as codex does
    read = parse(openai_responses, body(item("user", "go"), *echoed, item("user", "on"), tools=[])).messages[1:-1]
    if not items:
        assert not read
        return
    (message,) = read
    assert (message.content, message.reasoning, message.turn_id) == (content, reasoning, TURN_ID)
    assert [(c.id, c.name) for c in message.tool_calls] == [(c.id, c.name) for c in spoken.message.tool_calls]
    assert [json.loads(c.arguments) for c in message.tool_calls] == [json.loads(text) for _, text in uses]


def test_refusals_are_in_openais_words() -> None:
    fault = json.loads(openai_responses.error(ContextExceeded(10, 20)))["error"]
    assert fault["code"] == "context_length_exceeded" and "20 tokens" in fault["message"]
    assert ContextExceeded(10, 20).status == KeyRefused("x").status == 400


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (ContextExceeded(10, 20), "context_length_exceeded"),
        (NoCell("held"), "server_error"),
        (KeyRefused("x"), "invalid_prompt"),
    ],
)
def test_refusals_in_a_stream_tell_codex_whether_to_try_again(fault: Any, code: str) -> None:
    ((name, data),) = events(openai_responses.stream_error(fault))
    assert name == "response.failed" and data["response"]["error"]["code"] == code


async def test_openais_own_client_reads_answers_and_streams() -> None:
    def script(request: ModelRequest, number: int) -> Turn:
        if number == 2:
            raise ContextExceeded(10, 20)
        return turn("Look.", "hm", [("exec_command", '{"cmd": "ls"}')])

    asks: dict[str, Any] = {"model": "m", "input": "go", "tools": [EXEC]}
    async with (
        serving(script) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
    ):
        whole = await client.responses.create(**asks)
        async with client.responses.stream(**asks) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        with pytest.raises(BadRequestError, match="maximum context length is 10"):
            await client.responses.create(**asks)
    assert whole.output_text == final.output_text == "Look."
    assert kinds.count("response.in_progress") == 3 and kinds[-1] == "response.completed"
    assert [entry.type for entry in final.output] == ["reasoning", "message", "function_call"]
    assert final.usage is not None and final.usage.total_tokens == 107
