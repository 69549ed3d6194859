"""Rendering block by block: tokens grow at the end only, text stays text, joined blocks share a turn."""

from __future__ import annotations

from itertools import chain

from chat_parts import MARKS, SYSTEM, TURN_MARKS, blocks, messages_of, texts, tool_lists
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.chat.chatml import ChatML
from infra.chat.messages import Message, Tool, ToolCall
from infra.chat.qwen3 import Qwen3Renderer
from infra.chat.smollm2 import SmolLM2Renderer


def shown(renderer: ChatML, *messages: Message, tools: tuple[Tool, ...] = ()) -> str:
    return renderer.decode(list(chain(*blocks(renderer, None, tools, messages))))


@given(st.lists(messages_of(texts), min_size=1, max_size=6), tool_lists, st.one_of(st.none(), texts))
@settings(deadline=None)
def test_the_special_ids_of_a_conversation_come_from_its_structure_alone(
    renderer: ChatML, messages: list[Message], tools: tuple[Tool, ...], opening: str | None
) -> None:
    special = set(renderer.vocabulary.added.values())

    def count(some: list[Message], system: str | None) -> list[int]:
        root = None if system is None else Message(role="system", content=system)
        return [sum(token in special for token in block) for block in blocks(renderer, root, tools, some)]

    def blank(message: Message) -> Message:
        return Message(
            role=message.role,
            content="x" if message.content else "",
            reasoning="x" if message.reasoning else "",
            tool_calls=tuple(ToolCall(id="", name="x", arguments="{}") for _ in message.tool_calls),
            joined=message.joined,
        )

    plain = count([blank(message) for message in messages], None if opening is None else opening and "x")
    assert count(messages, opening) == plain


@given(st.lists(messages_of(texts), min_size=1, max_size=6), st.booleans())
@settings(deadline=None)
def test_a_block_depends_on_the_one_before_it_only_by_its_role(
    renderer: ChatML, messages: list[Message], closed: bool
) -> None:
    """So tokens(messages[:k]) is a prefix of tokens(messages[:k+1]): a block is rendered once, whatever follows."""
    for previous, message in zip([SYSTEM, *messages], messages, strict=False):
        stands = closed and previous.role == "assistant"
        block = renderer.message(previous, message, closed=stands)
        assert block == renderer.message(Message(role=previous.role, content="?"), message, closed=stands)
        assert block == renderer.message(previous, message, closed=stands)
        if message.role == "assistant":
            prompt = renderer.generation_prompt(previous, closed=stands)
            assert block[: len(prompt)] == prompt


@given(text=texts)
def test_text_comes_back_as_it_was(renderer: ChatML, text: str) -> None:
    assert renderer.decode(renderer.text(text)) == text
    assert not set(renderer.text(text)) & set(renderer.vocabulary.added.values())


def test_text_that_spells_every_special_token_has_none(renderer: ChatML) -> None:
    ids = renderer.text("".join([*TURN_MARKS, *MARKS]))
    assert not set(ids) & set(renderer.vocabulary.added.values())


def test_joined_blocks_go_on_inside_the_turn(renderer: ChatML) -> None:
    call = Message(role="assistant", tool_calls=(ToolCall(id="c", name="ls", arguments="{}"),))
    said = shown(
        renderer,
        Message(role="user", content="go"),
        Message(role="user", content="reminder", joined=True),
        Message(role="system", content="skills"),
        Message(role="system", content="more", joined=True),
        call,
        Message(role="tool", content="one"),
        Message(role="tool", content="two"),
        Message(role="user", content="and", joined=True),
        Message(role="tool", content="three", joined=True),
        Message(role="user", content="next"),
        Message(role="tool", content="late", joined=True),
        Message(role="tool", content="later"),
    )
    assert said == (
        "<|im_start|>user\ngo\nreminder<|im_end|>\n"
        "<|im_start|>system\nskills\nmore<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\nand\n"
        "<tool_response>\nthree\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nnext\n<tool_response>\nlate\n</tool_response>\n<tool_response>\nlater\n</tool_response>"
    )


def test_a_block_that_has_nothing_to_join_opens_a_turn_of_its_own(renderer: ChatML) -> None:
    joined = Message(role="user", content="b", joined=True)
    for before in (Message(role="assistant", content="a"), Message(role="system", content="a")):
        assert renderer.message(before, joined) == renderer.message(before, Message(role="user", content="b"))
    assert renderer.decode(renderer.message(None, joined)) == "<|im_start|>user\nb"


def test_a_turn_that_ended_itself_is_not_ended_again(renderer: ChatML) -> None:
    turn, user = Message(role="assistant", content="a"), Message(role="user", content="b")
    assert renderer.message(turn, user) == [renderer.im_end, *renderer.message(turn, user, closed=True)]
    assert renderer.generation_prompt(turn) == [renderer.im_end, *renderer.generation_prompt(turn, closed=True)]


def test_thinking_stays_in_every_turn(renderer: ChatML) -> None:
    first = Message(role="assistant", content="done", reasoning="hm")
    said = shown(renderer, Message(role="user", content="a"), first, Message(role="user", content="b"), first)
    assert said.count("<think>\nhm\n</think>\n\ndone") == 2


def test_the_families_spell_alike_and_differ_in_their_marks(qwen: Qwen3Renderer, smol: SmolLM2Renderer) -> None:
    talk = (
        Message(role="user", content="a."),
        Message(role="assistant", content="b.", reasoning="c", tool_calls=(ToolCall("i", "f", '{"x": 1}'),) * 2),
        Message(role="tool", content="<tool_response>"),
    )
    tools = (Tool(name="f", description="d"),)
    assert shown(qwen, *talk, tools=tools) == shown(smol, *talk, tools=tools)
    marks = {qwen.vocabulary.added[mark] for mark in MARKS}
    assert marks <= set(chain(*blocks(qwen, None, tools, talk)))
    added = set(smol.vocabulary.added.values())
    assert added & set(chain(*blocks(smol, None, tools, talk))) == {smol.im_start, smol.im_end}


def test_without_system_text_and_tools_there_is_no_root(renderer: ChatML) -> None:
    assert renderer.root(None, ()) == renderer.root(Message(role="system"), ()) == []
