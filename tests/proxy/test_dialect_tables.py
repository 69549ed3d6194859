"""Bodies of any kind, the closed tables of fields, their page, and the OpenAPI document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dialect_parts import events, head, turn
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from proxy.conversation.requests import ModelRequest
from proxy.dialects import anthropic, openai_chat
from proxy.dialects.dialect import Dialect
from proxy.dialects.openapi import openapi
from proxy.dialects.registry import DIALECTS
from proxy.errors import BadRequest
from workers.cli import app
from workers.dialects import page

each = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.NAME)

texts = st.text(max_size=10)  # lone surrogates included
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
near = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["type", "role", "content", "text", "id", "name", "tools"]), inner, max_size=4),
    ),
    max_leaves=6,
)


def sometimes(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what it should be; now and then anything."""
    return st.integers(0, 29).flatmap(lambda die: usual if die else near)


def thing(**members: Any) -> st.SearchStrategy[Any]:
    """An object that is mostly right. What is no strategy stands for itself."""
    given = {k: sometimes(v) if isinstance(v, st.SearchStrategy) else st.just(v) for k, v in members.items()}
    return sometimes(st.fixed_dictionaries(given, optional={"extra": near}))


def several(*kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(st.one_of(*kinds), max_size=3)


schemas = st.dictionaries(texts, anything, max_size=2)
block, entering, leaving = (thing(type=kind, text=texts) for kind in ("text", "input_text", "output_text"))
result = thing(type="tool_result", tool_use_id=texts, content=st.one_of(texts, several(block)))
thought = thing(type="thinking", thinking=texts, signature=texts)
use = thing(type="tool_use", id=texts, name=texts, input=schemas)
called = thing(id=texts, type="function", function=thing(name=texts, arguments=texts))
function = thing(type="function", name=texts, description=texts, parameters=schemas)
custom = thing(type="custom", name=texts, format=schemas)
GOOD: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "anthropic": (
        thing(role="user", content=st.one_of(texts, several(block, result))),
        thing(role="assistant", content=st.one_of(texts, several(block, thought, use))),
        thing(role="system", content=several(block)),
    ),
    "openai_chat": (
        thing(role=st.sampled_from(["system", "developer", "user"]), content=st.one_of(texts, several(block))),
        thing(role="assistant", content=st.none(), reasoning_content=texts, tool_calls=several(called)),
        thing(role="tool", tool_call_id=texts, content=texts),
    ),
    "openai_responses": (
        thing(type="message", role=st.sampled_from(["user", "developer"]), content=several(entering)),
        thing(type="message", role="assistant", content=several(leaving)),
        thing(type="reasoning", id=texts, summary=several(thing(type="summary_text", text=texts))),
        thing(type="function_call", call_id=texts, name=texts, arguments=texts, namespace=texts),
        thing(type="custom_tool_call", call_id=texts, name=texts, input=texts),
        thing(type="function_call_output", call_id=texts, output=st.one_of(texts, several(entering))),
    ),
}
TOOLS = {
    "anthropic": several(thing(name=texts, input_schema=schemas, description=texts), thing(type="web_search_1")),
    "openai_chat": several(thing(type="function", function=thing(name=texts, parameters=schemas))),
    "openai_responses": several(
        function, custom, thing(type="namespace", name=texts, tools=several(function)), thing(type="web_search")
    ),
}


def bodies_of(dialect: Dialect) -> st.SearchStrategy[Any]:
    """Mostly bodies that are nearly right; some that are anything."""
    listed = "input" if dialect.NAME == "openai_responses" else "messages"
    right = st.builds(
        lambda said, tools, fields: (
            {"max_tokens": 5, listed: [*said, {"role": "user", "content": "x"}], "tools": tools} | fields
        ),
        st.lists(st.one_of(*GOOD.get(dialect.NAME, (anything,))), max_size=5),
        sometimes(TOOLS.get(dialect.NAME, anything)),
        st.one_of(st.just({}), st.dictionaries(st.sampled_from(sorted(dialect.FIELDS)), near, max_size=1)),
    ).map(lambda body: {name: value for name, value in body.items() if name in dialect.FIELDS})
    fields = st.dictionaries(st.sampled_from(sorted(dialect.FIELDS)), near, max_size=3)
    return st.one_of(right, right, right, fields, anything)


DEEP = b'{"a":' * 500 + b"1" + b"}" * 500
DEEPER = b'{"a":' * 1010 + b"1" + b"}" * 1010
TOOL = b'[{"type": "function", "name": "x", "parameters": %b}]' % DEEP
CHAT_TOOL = b'[{"type": "function", "function": {"name": "x", "parameters": %b}}]' % DEEP
USE = b'[{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "x", "input": %b}]}]' % DEEPER


@each
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_json_is_a_request_or_a_bad_request(dialect: Dialect, data: st.DataObject) -> None:
    check(dialect, json.dumps(data.draw(bodies_of(dialect))).encode())


@each
@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=50))
@example(body=b"[" * 100_000)
@example(body=b'{"messages":' * 5000)
@example(body=b'{"input": "\\ud800", "max_output_tokens": 123456789012345678901234567890}')
@example(body=b'{"input": "\\ud800", "metadata": {"a": 1e999}}')
@example(body=b'{"input": "go", "metadata": %b}' % DEEP)
@example(body=b'{"input": "go", "tools": %b}' % TOOL)
@example(body=b'{"messages": [{"role": "user"}], "tools": %b}' % CHAT_TOOL)
@example(body=b'{"max_tokens": 5, "messages": %b}' % USE)
def test_any_bytes_are_a_request_or_a_bad_request(dialect: Dialect, body: bytes) -> None:
    check(dialect, body)


def check(dialect: Dialect, body: bytes) -> None:
    try:
        request = dialect.parse(body, {})
    except BadRequest as fault:
        assert json.loads(dialect.error(fault))["error"]["message"]
        assert fault.status == 400
        return
    assert isinstance(request, ModelRequest)
    assert request.messages and request.messages[-1].role != "assistant"
    assert len(request.keys) == len(request.messages) and not request.messages[0].joined
    assert not any(message.joined for message in request.messages if message.role == "assistant")
    spoken = turn("x", "y", [(tool.name, "{}") for tool in request.tools])
    assert json.loads(dialect.response(request, spoken))
    assert events(dialect.stream_start(request, head()) + dialect.stream_turn(request, spoken))


@each
def test_every_field_has_a_place_in_the_table_and_refusals_say_what_they_take(dialect: Dialect) -> None:
    for name, field in dialect.FIELDS.items():
        assert "|" not in field.note
        assert field.note or field.treatment != "refused", name
    paths = openapi()["paths"]
    schema = paths[dialect.PATHS[0]]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == set(dialect.FIELDS) and schema["additionalProperties"] is False


def test_the_document_has_every_path_of_a_model_once() -> None:
    assert set(openapi()["paths"]) == {anthropic.COUNT_PATH} | {dialect.PATHS[0] for dialect in DIALECTS}
    json.dumps(openapi())


def test_the_page_and_the_command_say_what_the_tables_say() -> None:
    assert (Path(__file__).parents[2] / "docs" / "dialects.md").read_text(encoding="utf-8") == page()
    printed = CliRunner().invoke(app, ["doctor", "--dialects", "--json"])
    assert printed.exit_code == 0
    said = json.loads(printed.stdout)
    assert {name: len(table["fields"]) for name, table in said.items()} == {d.NAME: len(d.FIELDS) for d in DIALECTS}
    assert said["openai_chat"]["fields"]["n"]["treatment"] == "refused"
    shown = CliRunner().invoke(app, ["doctor", "--dialects"])
    assert shown.exit_code == 0 and all(name in shown.stdout for name in openai_chat.FIELDS)
