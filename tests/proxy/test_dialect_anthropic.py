"""Anthropic Messages as Claude Code speaks it: what is read, what is refused, and what a stream looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dialect_parts import TURN_ID, events, head, parse, turn
from hypothesis import given
from hypothesis import strategies as st

from infra.chat.messages import Message
from proxy.dialects import anthropic
from proxy.errors import (
    BadRequest,
    BodyTooLarge,
    CallsExceeded,
    ContextExceeded,
    KeyRefused,
    NoCell,
    UnknownPath,
)

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
BASH = {"name": "Bash", "description": "Runs.", "input_schema": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
MARK = {"cache_control": {"type": "ephemeral"}}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 10, "messages": list(messages) or [user("go")], **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def use(identity: str = "t1", name: str = "Bash", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": identity, "name": name, "input": arguments}


def result(identity: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": identity, "content": content, **more}


def refused(request: Any, param: str | None = None) -> str:
    with pytest.raises(BadRequest) as caught:
        parse(anthropic, request)
    if param is not None:
        assert caught.value.param == param
    return str(caught.value)


# --- reading ------------------------------------------------------------------------------------------------------


def test_a_request_of_claude_code_is_read_whole() -> None:
    request = parse(
        anthropic,
        {
            "model": "gyre-policy",
            "max_tokens": 32000,
            "stream": True,
            "system": [
                text("x-anthropic-billing-header: cc_version=2.1.220.abc; cc_entrypoint=sdk-cli;"),
                text("You are an agent.", **MARK),
                text("Work well.", **MARK),
            ],
            "messages": [
                user([text("<system-reminder>"), text("fix it")]),
                {"role": "system", "content": "agents"},
                said(
                    {"type": "thinking", "thinking": "hm", "signature": f"gyre_{TURN_ID}"}, text("Look."), use(b=1, a=2)
                ),
                user([result("t1", [text("one"), text("two")], is_error=True), text("a reminder", **MARK)]),
            ],
            "tools": [BASH],
            "thinking": {"type": "adaptive", "display": "omitted"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "metadata": {"user_id": "{}"},
        },
        {"x-claude-code-session-id": "s"},
    )
    assert request.system == Message("system", "You are an agent.\n\nWork well.")
    first, prompt, agents, assistant, answer, reminder = request.messages
    assert [first.joined, prompt.joined] == [False, True] and prompt.content == "fix it"
    assert agents == Message("system", "agents")
    assert assistant.reasoning == "hm" and assistant.content == "Look." and assistant.turn_id == TURN_ID
    assert assistant.tool_calls[0].arguments == '{"b": 1, "a": 2}'
    assert answer == Message("tool", "one\ntwo", tool_call_id="t1")
    assert reminder == Message("user", "a reminder", joined=True)
    assert request.tools[0].parameters == SCHEMA and request.max_tokens == 32000 and request.stream
    assert set(request.asked) == {"thinking", "context_management", "output_config", "metadata"}
    assert request.hints.sub_agent is False and request.hints.summary is False and request.hints.side is None


def test_forms_that_change_from_turn_to_turn_do_not_change_a_request() -> None:
    plain = parse(anthropic, body(user("go"), said(use()), user([result("t1", "x")])))
    moved = parse(anthropic, body(user([text("go", **MARK)]), said(use()), user([result("t1", [text("x")], **MARK)])))
    assert plain.keys == moved.keys and plain.digest == moved.digest and plain.root == moved.root


def test_the_billing_line_does_not_count_and_names_a_sub_agent() -> None:
    lines = [f"x-anthropic-billing-header: cc_version=2.1.220.{end};" for end in ("abc", "123; cc_is_subagent=true")]
    main, sub = (parse(anthropic, body(system=[text(line), text("S")])) for line in lines)
    assert main.root == sub.root and main.system == Message("system", "S")
    assert (main.hints.sub_agent, sub.hints.sub_agent) == (False, True)
    assert parse(anthropic, body()).hints.sub_agent is None
    assert parse(anthropic, body(system=[text(lines[0])])).system is None


def test_agents_are_named_by_their_headers() -> None:
    headers = {"x-claude-code-agent-id": "a1", "x-claude-code-parent-agent-id": "a0", "x-claude-code-session-id": "s"}
    hints = parse(anthropic, body(), headers).hints
    assert (hints.agent, hints.parent, hints.sub_agent) == ("a1", "a0", True)


@pytest.mark.parametrize(
    ("before", "last", "summary"), [(MARK, {}, True), ({}, MARK, False), (MARK, MARK, False), ({}, {}, None)]
)
def test_a_compaction_is_marked_by_where_the_cache_mark_stands(before: Any, last: Any, summary: bool | None) -> None:
    request = body(user("go"), said(text("a", **before)), user([text("summarise", **last)]))
    assert parse(anthropic, request).hints.summary is summary


def test_provider_tools_are_left_out_and_alone_make_a_side_call() -> None:
    both = parse(anthropic, body(tools=[BASH, SEARCH]))
    assert [tool.name for tool in both.tools] == ["Bash"] and both.asked["tools"] == [SEARCH]
    assert both.hints.side is None
    alone = parse(anthropic, body(tools=[SEARCH], tool_choice={"type": "auto"}))
    assert alone.tools == () and alone.hints.side is True
    assert parse(anthropic, body(model="gyre-side")).hints.side is True


def test_whitespace_beside_other_blocks_is_dropped_and_texts_are_one() -> None:
    read = parse(anthropic, body(user("go"), said(text("\n"), text("a "), text("b"), use()), user("x"))).messages[1]
    assert read.content == "a b"
    assert parse(anthropic, body(user("go"), said(text(" ")), user("x"))).messages[1].content == " "


def test_results_stay_in_the_order_in_which_they_come() -> None:
    request = body(user("go"), said(use("a"), use("b")), user([result("b", "2"), result("a", None)]))
    assert [(m.tool_call_id, m.joined) for m in parse(anthropic, request).messages[2:]] == [("b", False), ("a", True)]


def test_foreign_signatures_name_no_turn() -> None:
    for signature in ("", "EqQBCgIYAhIM", f"gyre_{TURN_ID}x", None):
        block = {"type": "thinking", "thinking": "x", "signature": signature}
        assert parse(anthropic, body(user("go"), said(block), user("x"))).messages[1].turn_id == ""


def test_lone_surrogates_become_replacement_characters() -> None:
    raw = json.dumps(body(user("a \udcff b"), said(use(command="\ud800")), user("x"))).encode()
    read = parse(anthropic, raw)
    assert read.messages[0].content == "a � b" and read.messages[1].tool_calls[0].arguments == '{"command": "�"}'


# --- refusing -----------------------------------------------------------------------------------------------------


def test_unknown_fields_are_refused_in_anthropics_words() -> None:
    assert refused(body(wizardry=1), "wizardry") == "wizardry: Extra inputs are not permitted"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "Bash"}},
        {"stop_sequences": ["\n"]},
        {"thinking": {"type": "wild"}},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "turns", "value": 1}}]}},
        {"context_management": {"edits": 5}},
        {"output_config": {"format": {"type": "json_schema"}}},
        {"output_format": {"type": "json_schema"}},
        {"mcp_servers": [{"url": "x"}]},
        {"container": "c"},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"max_tokens": None},
        {"stream": "yes"},
        {"messages": []},
        {"messages": "go"},
        {"messages": None},
        {"messages": [user("a"), said(text("prefill"))]},
        {"messages": [user(5)]},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [user([{"type": "image", "source": {}}])]},
        {"messages": [user([{"type": "document", "source": {}}])]},
        {"messages": [user([result("t1", [{"type": "image", "source": {}}])])]},
        {"messages": [user([{"type": "tool_result", "content": "x"}])]},
        {"messages": [user("a"), said({"type": "redacted_thinking", "data": "x"}), user("b")]},
        {"messages": [user("a"), said({"type": "tool_use", "id": 5, "name": "x"}), user("b")]},
        {"messages": [{"role": "system", "content": [result("t1", "x")]}]},
        {"tools": [{"name": "x"}]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"system": 5},
    ],
)
def test_what_would_change_sampling_or_cannot_be_read_is_refused(fields: dict[str, Any]) -> None:
    (name,) = fields
    assert name.split("_", maxsplit=1)[0] in refused(body() | fields)


def test_images_are_refused_in_clear_words() -> None:
    assert "the policy reads text only" in refused(body(user([{"type": "image"}])))


def test_harmless_fields_are_recorded() -> None:
    given = {"temperature": 0.5, "top_p": 1, "top_k": 5, "service_tier": "auto", "betas": ["x"], "cache_control": {}}
    assert parse(anthropic, body(stop_sequences=[], mcp_servers=[], container=None, **given)).asked == given


# --- answering ----------------------------------------------------------------------------------------------------


def test_a_stream_has_the_order_that_claude_code_takes() -> None:
    request = parse(anthropic, body(stream=True, thinking={"type": "adaptive"}))
    spoken = turn("Look.", "hm", [("Bash", '{"command": "ls"}')])
    read = events(anthropic.stream_start(request, head()) + anthropic.PING + anthropic.stream_turn(request, spoken))
    assert all(name == data["type"] for name, data in read)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = [block[0], block[1], *block[1:]]
    assert [name for name, _ in read] == [
        "message_start", "ping", "ping", *thinking, *block, *block, "message_delta", "message_stop",
    ]  # fmt: skip
    start, end = read[0][1]["message"], read[-2][1]
    assert start["usage"]["input_tokens"] == 100 and start["content"] == [] and start["stop_reason"] is None
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and end["usage"]["output_tokens"] == 7
    assert json.loads(anthropic.response(request, spoken))["content"] == echo(read)


def echo(read: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a client makes of a stream."""
    blocks: dict[int, dict[str, Any]] = {}
    partial: dict[int, str] = {}
    for _, data in read:
        if data["type"] == "content_block_start":
            blocks[data["index"]] = dict(data["content_block"])
        elif data["type"] == "content_block_delta":
            delta, block = data["delta"], blocks[data["index"]]
            kind = delta["type"].removesuffix("_delta")
            if kind == "input_json":
                partial[data["index"]] = partial.get(data["index"], "") + delta["partial_json"]
            else:
                block[kind] += delta[kind]
    for index, written in partial.items():
        blocks[index]["input"] = json.loads(written)
    return list(blocks.values())


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.floats(allow_nan=False, allow_infinity=False), words
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=5,
)
calls = st.lists(st.tuples(words, st.dictionaries(words, values, max_size=3).map(json.dumps)), max_size=3)


@given(words.filter(lambda content: not content or content.strip()), words, calls, st.booleans())
def test_a_turn_that_is_sent_back_is_the_turn_that_was_sent(
    content: str, reasoning: str, uses: list[tuple[str, str]], streams: bool
) -> None:
    request = parse(anthropic, body(thinking={"type": "enabled", "budget_tokens": 1024}))
    spoken = turn(content, reasoning, uses)
    if streams:
        blocks = echo(events(anthropic.stream_turn(request, spoken)))
    else:
        blocks = json.loads(anthropic.response(request, spoken))["content"]
    read = parse(anthropic, body(user("go"), said(*blocks), user("on"))).messages[1]
    assert (read.content, read.reasoning, read.turn_id) == (content, reasoning, TURN_ID)
    assert [(c.id, c.name) for c in read.tool_calls] == [(c.id, c.name) for c in spoken.message.tool_calls]
    assert [json.loads(c.arguments) for c in read.tool_calls] == [json.loads(a) for _, a in uses]


@pytest.mark.parametrize(
    ("finish", "uses", "stop"),
    [
        ("stop", [], "end_turn"),
        ("stop", [("Bash", "{}")], "tool_use"),
        ("length", [], "max_tokens"),
        ("context", [("Bash", "{}")], "model_context_window_exceeded"),
    ],
)
def test_stop_reasons(finish: str, uses: list[tuple[str, str]], stop: str) -> None:
    request = parse(anthropic, body())
    whole = json.loads(anthropic.response(request, turn("x", calls=uses, finish=finish)))
    assert whole["stop_reason"] == stop
    assert whole["usage"] == {
        "input_tokens": 100,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 7,
    }


def test_a_turn_without_words_has_no_blocks_where_nobody_asked_for_thinking() -> None:
    assert json.loads(anthropic.response(parse(anthropic, body()), turn()))["content"] == []
    off = parse(anthropic, body(thinking={"type": "disabled"}))
    assert json.loads(anthropic.response(off, turn()))["content"] == []


def test_surrogates_in_sampled_arguments_do_not_break_an_answer() -> None:
    whole = json.loads(anthropic.response(parse(anthropic, body()), turn(calls=[("Bash", '{"a": "\\ud800"}')])))
    assert whole["content"][0]["input"] == {"a": "�"}


def test_tokens_are_counted_without_max_tokens() -> None:
    request = {"model": "m", "messages": [user("go")], "tools": [BASH]}
    assert anthropic.parse_count(json.dumps(request).encode(), {}).messages == (Message("user", "go"),)
    assert json.loads(anthropic.count_tokens(42)) == {"input_tokens": 42}
    assert "Field required" in refused(request, "max_tokens")


@pytest.mark.parametrize(
    ("fault", "status", "kind", "words_of_it"),
    [
        (ContextExceeded(1000, 1200), 400, "invalid_request_error", "prompt is too long: 1200 tokens > 1000 maximum"),
        (ContextExceeded(1000, 1000), 400, "invalid_request_error", "prompt is too long: 1000 tokens > 999 maximum"),
        (KeyRefused("unknown"), 400, "authentication_error", "invalid x-api-key: unknown"),
        (CallsExceeded("100"), 400, "invalid_request_error", "You have reached"),
        (BadRequest("x: bad", param="x"), 400, "invalid_request_error", "x: bad"),
        (BodyTooLarge("big"), 413, "request_too_large", "maximum size"),
        (UnknownPath("GET /x"), 404, "not_found_error", "/x"),
        (NoCell("held"), 503, "api_error", "held"),
    ],
)
def test_refusals_are_in_anthropics_words(fault: Any, status: int, kind: str, words_of_it: str) -> None:
    whole = json.loads(anthropic.error(fault))
    assert fault.status == status
    assert whole["type"] == "error" and whole["error"]["type"] == kind and words_of_it in whole["error"]["message"]
    assert events(anthropic.stream_error(fault)) == [("error", whole)]
