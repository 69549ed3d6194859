"""The exported chat template says in transformers what the renderer says in gyre."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from chat_parts import MARKS, TURN_MARKS, any_text, arguments, blocks, names, tool_lists, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from infra.chat.chatml import ChatML
from infra.chat.export import write_template
from infra.chat.messages import Message, Tool, ToolCall
from infra.chat.qwen3 import Qwen3Renderer
from infra.chat.smollm2 import SmolLM2Renderer


def unspelled(text: str) -> bool:
    return not any(mark in text for mark in [*TURN_MARKS, *MARKS])


def starts_dark(text: str) -> bool:
    """transformers tokenises the turn's header and what follows together: white space there merges."""
    return not text[:1].isspace()


shown = any_text.filter(unspelled)
said = shown.filter(starts_dark)
results = st.builds(Message, role=st.just("tool"), content=shown)
others = st.builds(Message, role=st.sampled_from(["system", "user"]), content=shown)
turns = st.builds(
    Message,
    role=st.just("assistant"),
    content=said,
    reasoning=shown,
    tool_calls=st.lists(st.builds(ToolCall, st.just("c"), names, arguments), max_size=3).map(tuple),
)
words = st.text(st.characters(categories=["L"]), min_size=1, max_size=8)
joined = st.builds(Message, role=st.sampled_from(["system", "user", "tool"]), content=words, joined=st.booleans())


@pytest.fixture(scope="module", params=["qwen", "qwen compact", "smol", "smol compact"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatML, Any]:
    folder, qwen = tmp_path_factory.mktemp("exported"), "qwen" in request.param
    file = write_tokenizer(folder, qwen=qwen)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": "old"})
    )
    renderer = (Qwen3Renderer if qwen else SmolLM2Renderer)(file, compact_tools="compact" in request.param)
    write_template(folder, renderer)
    return renderer, AutoTokenizer.from_pretrained(folder)


def as_sent(message: Message) -> dict[str, Any]:
    sent: dict[str, Any] = {"role": message.role, "content": message.content, "joined": message.joined}
    if message.reasoning:
        sent["reasoning_content"] = message.reasoning
    if message.tool_calls:
        sent["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return sent


def check(exported: tuple[ChatML, Any], system: str, tools: tuple[Tool, ...], messages: list[Message]) -> None:
    renderer, tokenizer = exported
    opening = Message(role="system", content=system) if system else None
    conversation = [as_sent(message) for message in ([opening] if opening else []) + messages]
    schemas = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in tools
    ]
    for prompted in (False, True):
        ids = tokenizer.apply_chat_template(
            conversation, tools=schemas or None, add_generation_prompt=prompted, return_dict=False
        )
        ours = list(chain(*blocks(renderer, opening, tools, messages)))
        ours += renderer.generation_prompt(messages[-1]) if prompted else [renderer.im_end, *renderer.text("\n")]
        assert ids == ours, tokenizer.decode(ids)


@given(shown, tool_lists, st.lists(st.one_of(others, turns, results), max_size=5), others)
@settings(max_examples=80, deadline=None)
def test_transformers_renders_any_conversation_to_the_same_tokens(
    exported: tuple[ChatML, Any], system: str, tools: tuple[Tool, ...], messages: list[Message], last: Message
) -> None:
    first = Message(role="user", content="go")  # a system message that comes first is the root's
    if all(unspelled(tool.description) for tool in tools):
        check(exported, system, tools, [first, *messages, last])


@given(tool_lists, st.lists(joined, min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_joined_blocks_are_the_same_tokens_where_words_meet(
    exported: tuple[ChatML, Any], tools: tuple[Tool, ...], messages: list[Message]
) -> None:
    if all(unspelled(tool.description) for tool in tools):
        check(exported, "", tools, [Message(role="user", content="go"), *messages])


def test_texts_in_a_list_are_joined_blocks(exported: tuple[ChatML, Any]) -> None:
    renderer, tokenizer = exported
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, return_dict=False
    )
    messages = [Message(role="user", content="one"), Message(role="user", content="two", joined=True)]
    assert ids == [*chain(*blocks(renderer, None, (), messages)), *renderer.generation_prompt(messages[-1])]


def test_arguments_may_be_an_object(exported: tuple[ChatML, Any]) -> None:
    _, tokenizer = exported
    call = {"name": "f", "arguments": {"é": [1, "<b>"]}}
    sent = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}]
    text = tokenizer.apply_chat_template(sent, tokenize=False)
    assert '<tool_call>\n{"name": "f", "arguments": {"é": [1, "<b>"]}}\n</tool_call><|im_end|>\n' in text


def test_the_template_is_in_both_files_and_replaces_what_was_there(exported: tuple[ChatML, Any]) -> None:
    renderer, tokenizer = exported
    folder = Path(tokenizer.name_or_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (folder / "chat_template.jinja").read_text() == config["chat_template"] == renderer.template
    assert config["eos_token"] == "<|im_end|>"
    assert not list(folder.glob("*.part"))
