"""ChatML, block by block: the turns, tools, tool calls and thinking that the ChatML families share.

A block holds the *closing* of the block before it (what must stand between the two depends on both), then its own
opening and body. A joined block goes on inside the turn before it. Families differ in how the marks (``<tool_call>``
and the like) are spelled, as special tokens or as text, and in how a sampled turn is read.

It knows neither the ledger nor HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from infra.chat.messages import Message, Tool
from infra.chat.tokens import Part, Vocabulary

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<tool_response>", "</tool_response>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MARKS = (CALL_OPEN, CALL_CLOSE, RESPONSE_OPEN, RESPONSE_CLOSE, THINK_OPEN, THINK_CLOSE)

TEMPLATE = Path(__file__).parent / "templates" / "chatml.jinja"
_FULL, _COMPACT = "{%- set compact_tools = false %}", "{%- set compact_tools = true %}"

TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_TAIL = "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
CALL_SHAPE = '\n{"name": <function-name>, "arguments": <args-json-object>}\n'


class ChatML:
    """``compact_tools`` lists tools by name only (``Tools: a, b.``), for policies whose context is too small for
    JSON schemas; otherwise the tools are written as Qwen3's template writes them.
    """

    def __init__(self, vocabulary: Vocabulary, mark: Callable[[str], Part], *, compact_tools: bool) -> None:
        """``mark``: how the family spells a mark. Raises TokenizerUnfit."""
        self.vocabulary, self.tokenizer = vocabulary, vocabulary.tokenizer
        self.vocab_size = vocabulary.size
        self.im_start, self.im_end = vocabulary.special(IM_START), vocabulary.special(IM_END)
        self.stop_token_ids = (self.im_end,)
        self.text, self.decode = vocabulary.text, vocabulary.decode
        self._compact = compact_tools
        self._mark = {spelling: mark(spelling) for spelling in MARKS}
        self._newline = self.text("\n")
        self._assistant = [self.im_start, *self.text("assistant\n")]
        vocabulary.bytes_of(self._newline[0])  # refuses a tokenizer that turns can't be read with

    @property
    def template(self) -> str:
        source = TEMPLATE.read_text(encoding="utf-8")
        return source.replace(_FULL, _COMPACT) if self._compact else source

    def root(self, system: Message | None, tools: Sequence[Tool]) -> list[int]:
        """System text and tools; empty when there is neither."""
        parts: list[Part] = [system.content] if system is not None and system.content else []
        if tools:
            parts += ["\n\n"] if parts else []
            parts += self._names(tools) if self._compact else self._schemas(tools)
        return self.vocabulary.ids([self.im_start, "system\n", *parts]) if parts else []

    def message(self, previous: Message | None, message: Message, *, closed: bool = False) -> list[int]:
        turn = _turn(message)
        if turn == "assistant":
            return self.generation_prompt(previous, closed=closed) + self.vocabulary.ids(self._body(message))
        opened = (
            previous is not None and _turn(previous) == turn and (message.joined or _both_results(previous, message))
        )
        opening: list[Part] = [] if opened else [self.im_start, turn]
        closing = [] if opened else self._closing(previous, closed=closed)
        return closing + self.vocabulary.ids([*opening, "\n", *self._context(message)])

    def generation_prompt(self, previous: Message | None, *, closed: bool = False) -> list[int]:
        return self._closing(previous, closed=closed) + self._assistant

    def _closing(self, previous: Message | None, *, closed: bool) -> list[int]:
        if previous is None:
            return []
        return [*self._newline] if closed else [self.im_end, *self._newline]

    def _context(self, message: Message) -> list[Part]:
        """What the policy is shown in a block that isn't its own."""
        if message.role != "tool":
            return [message.content]
        return [self._mark[RESPONSE_OPEN], "\n", message.content, "\n", self._mark[RESPONSE_CLOSE]]

    def _body(self, message: Message) -> list[Part]:
        parts: list[Part] = []
        if message.reasoning:
            parts += [self._mark[THINK_OPEN], "\n", message.reasoning, "\n", self._mark[THINK_CLOSE], "\n\n"]
        parts.append(message.content)
        for place, call in enumerate(message.tool_calls):
            name = json.dumps(call.name, ensure_ascii=False)
            parts += ["\n"] if place or message.content else []
            parts += [self._mark[CALL_OPEN], f'\n{{"name": {name}, "arguments": {call.arguments}}}\n']
            parts.append(self._mark[CALL_CLOSE])
        return parts

    def _names(self, tools: Sequence[Tool]) -> list[Part]:
        return ["Tools: " + ", ".join(tool.name for tool in tools) + "."]

    def _schemas(self, tools: Sequence[Tool]) -> list[Part]:
        parts: list[Part] = [TOOLS_HEAD]
        for tool in tools:
            schema = {"type": "function", "function": msgspec.structs.asdict(tool)}
            parts.append("\n" + json.dumps(schema, ensure_ascii=False))
        opening, closing = self._mark[CALL_OPEN], self._mark[CALL_CLOSE]
        return [*parts, TOOLS_TAIL, opening, closing, " XML tags:\n", opening, CALL_SHAPE, closing]


def _turn(message: Message) -> str:
    """The role of the turn in which a block stands: tool results are in a user's."""
    return "user" if message.role == "tool" else message.role


def _both_results(previous: Message, message: Message) -> bool:
    """Consecutive tool results share a turn, joined or not."""
    return previous.role == "tool" and message.role == "tool"
