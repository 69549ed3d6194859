"""Sampled turns and what harnesses make of them: the same turn in another form, another turn, a part of it."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.chat.messages import Message, Tool, ToolCall
from proxy.conversation.canonical import kept_calls, rewritten, said_key, same_call

EDIT = {
    "type": "object",
    "properties": {
        "file_path": {"type": "string"},
        "new_string": {"type": "string"},
        "replace_all": {"type": "boolean", "default": False},
        "options": {"type": "object", "properties": {"mode": {"default": "fast"}}},
    },
}
TOOLS = (Tool(name="Bash"), Tool(name="Edit", parameters=EDIT))


def call(arguments: str, name: str = "Bash", id_: str = "c") -> ToolCall:
    return ToolCall(id=id_, name=name, arguments=arguments)


def turn(*arguments: str, text: str = "", reasoning: str = "") -> Message:
    calls = tuple(call(each, id_=f"c{i}") for i, each in enumerate(arguments))
    return Message(role="assistant", content=text, reasoning=reasoning, tool_calls=calls)


FORMS = [
    ("whitespace", '{ "command" :\n "ls" }', '{"command":"ls"}'),
    ("key order", '{"description":"d","command":"ls"}', '{"command":"ls","description":"d"}'),
    ("a whole float", '{"timeout":5000.0}', '{"timeout":5000}'),
    ("an exponent", '{"timeout":5e3}', '{"timeout":5000}'),
    ("a negative zero", '{"timeout":-0.0}', '{"timeout":0}'),
    ("a number in quotes", '{"timeout":"5000"}', '{"timeout":5000}'),
    ("a boolean in quotes", '{"background":"false"}', '{"background":false}'),
    ("escapes", '{"command":"caf\\u00e9 \\/tmp"}', '{"command":"café /tmp"}'),
    ("half a pair", '{"command":"\\ud800"}', '{ "command":"\\ud800"}'),
    ("blanks at line ends", '{"content":"a  \\n\\tb\\t\\r\\nc "}', '{"content":"a\\n\\tb\\nc"}'),
    ("a leading cd", '{"command":"cd /work/a && ls"}', '{"command":"ls"}'),
    ("two of them", '{"command":"cd \\"/a b\\" && cd c\\\\ d && ls"}', '{"command":"cd c\\\\ d && ls"}'),
    ("null", '{"command":"ls","timeout":null}', '{"command":"ls"}'),
    ("no arguments", "", "{}"),
    ("a large integer", '{"n":12345678901234567890}', '{"n":12345678901234567000}'),
    ("unparsable", '{"command":', '{"__unparsedToolInput":{"raw":"{\\"command\\":","len":11}}'),
    ("unparsable, cut", "{" + "x" * 99, '{"__unparsedToolInput":{"raw":"{xxxx","len":100}}'),
]


@pytest.mark.parametrize(("said", "sent"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS])
def test_a_call_in_another_form_is_the_same_call(said: str, sent: str) -> None:
    assert same_call(call(said), call(sent), {})
    assert not rewritten(turn(said), turn(sent), TOOLS)
    if "xxxx" not in said:
        assert said_key(turn(said)) == said_key(turn(sent))


OTHERS = [
    ('{"command":"ls"}', '{"command":"ls -l"}'),
    ('{"command":"ls"}', '{"command":"ls","timeout":5}'),
    ('{"command":"ls"}', '["ls"]'),
    ('{"timeout":5000}', '{"timeout":5001}'),
    ('{"command":"  ls"}', '{"command":"ls"}'),
    ('{"command":"cd /a; ls"}', '{"command":"ls"}'),
    ('{"command":', '{"command":"ls"}'),
    ('{"a":["x","y"]}', '{"a":["y","x"]}'),
    ('{"command":', '{"__unparsedToolInput":{"raw":"{","len":12}}'),
]


@pytest.mark.parametrize(("said", "sent"), OTHERS)
def test_a_call_that_says_something_else_is_another_call(said: str, sent: str) -> None:
    assert not same_call(call(said), call(sent), {})
    assert rewritten(turn(said), turn(sent), TOOLS)
    assert not same_call(call(said), call(said, "Edit"), {})


def test_defaults_of_the_schema_may_come_and_go() -> None:
    said = '{"file_path":"a","new_string":"b"}'
    sent = '{"replace_all":false,"file_path":"a","new_string":"b"}'
    for one, other in ((said, sent), (sent, said)):
        assert same_call(call(one, "Edit"), call(other, "Edit"), EDIT)
        assert not same_call(call(one, "Edit"), call(other, "Edit"), {})
        assert said_key(turn(one)) == said_key(turn(other))
    assert not same_call(call(said, "Edit"), call(sent.replace("false", "true"), "Edit"), EDIT)
    nested = '{"options":{"mode":"fast"}}', '{"options":{}}'
    assert same_call(call(nested[0], "Edit"), call(nested[1], "Edit"), EDIT)
    assert same_call(call(said), call(said + " "), {"properties": ["no", "schema"], "items": 3})


def test_blanks_around_a_text_and_left_out_reasoning_change_nothing() -> None:
    said = turn('{"a":1}', text="I look\n\n", reasoning="hm\n")
    assert not rewritten(said, turn('{"a":1}', text="I look", reasoning="hm"), TOOLS)
    assert not rewritten(said, turn('{"a":1}', text="I look"), TOOLS)
    assert not rewritten(turn('{"a":1}', text="\n\n"), turn('{"a":1}'), TOOLS)
    assert rewritten(said, turn('{"a":1}', text="I  look"), TOOLS)
    assert rewritten(said, turn('{"a":1}', text="I look", reasoning="ha"), TOOLS)
    assert rewritten(said, turn(text="I look"), TOOLS)


def test_a_turn_cut_by_a_kill_is_a_part_of_what_was_said() -> None:
    said = turn('{"a":1}', '{"a":2}', text="I look", reasoning="hm")
    for left in range(2):
        sent = msgspec.structs.replace(said, tool_calls=said.tool_calls[:left])
        assert kept_calls(said, sent) == left
        assert kept_calls(said, msgspec.structs.replace(sent, reasoning="")) == left
        assert kept_calls(said, msgspec.structs.replace(sent, reasoning="ha")) is None
        assert kept_calls(said, msgspec.structs.replace(sent, content="")) is None
    assert kept_calls(said, said) is None
    assert kept_calls(said, msgspec.structs.replace(said, tool_calls=said.tool_calls[1:])) is None
    assert kept_calls(turn(text="a"), turn(text="a")) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["command", "timeout", "content"]) | st.text(), JSON, max_size=4)
ANY_TEXT = st.text(st.characters(exclude_categories=())) | st.sampled_from(
    [
        "[" * 5000,
        "[" * 900 + "]" * 900,
        '{"a":' * 300 + "1" + "}" * 300,
        "9" * 5000,
        "1e999",
        "NaN",
        '{"__unparsedToolInput":{"raw":"{\\"__unparsedToolInput\\":{}}","len":true}}',
        '{"command":"' + "cd a && " * 2000 + '"}',
        '{"command":"cd \'' + '\\"' * 4000 + '"}',
    ]
)


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [reversed_keys(part) for part in value] if isinstance(value, list) else value


@settings(max_examples=300, deadline=None)
@given(ARGUMENTS)
def test_json_that_is_written_anew_is_the_same_call(arguments: dict[str, Any]) -> None:
    said = json.dumps(arguments, indent=1)
    sent = json.dumps(reversed_keys(arguments), ensure_ascii=False, separators=(",", ":"))
    assert same_call(call(said), call(sent), {}) and not rewritten(turn(said), turn(sent), TOOLS)
    assert said_key(turn(said)) == said_key(turn(sent))
    assert same_call(call(sent), call(said), {})


@settings(max_examples=500, deadline=None)
@given(ANY_TEXT, ANY_TEXT, ANY_TEXT)
def test_no_text_whatever_raises(one: str, other: str, text: str) -> None:
    said, sent = turn(one, one, text=text), turn(other, one, text=text)
    assert isinstance(rewritten(said, sent, TOOLS), bool)
    assert not rewritten(said, said, TOOLS)
    assert rewritten(said, sent, TOOLS) != same_call(call(one), call(other), {})
    assert hash(said_key(said)) is not None and said_key(said) == said_key(said)
    assert kept_calls(said, msgspec.structs.replace(said, tool_calls=said.tool_calls[:1])) == 1


def test_large_arguments_are_compared_in_a_moment() -> None:
    lines = "x" + " " * 200 + "y\n"
    hostile = ["cd a && " * 20_000, "cd '" * 20_000, 'cd "' * 20_000, lines * 1000, " " * 200_000, "\\" * 200_000]
    for text in hostile:
        said, sent = json.dumps({"command": text}), json.dumps({"command": text + "!"})
        begun = time.perf_counter()
        assert not same_call(call(said), call(sent), {})
        said_key(turn(said))
        assert time.perf_counter() - begun < 1.0
