"""ChatML rendering, block by block: messages to token ids that only ever grow at the end.

Invariant: tokens(messages[:k]) is a prefix of tokens(messages[:k+1]). Each block is tokenised on its own, so text
appended later never re-merges earlier tokens, and nothing that was rendered or sampled is ever rewritten: thinking
stays where the stock templates strip it. Text that spells a special token is encoded as plain text; special ids
come only from the structure.

A block holds the *closing* of the block before it (what must stand between the two depends on both), then its own
opening and body. The renderer knows neither the ledger nor HTTP.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from infra.chat.messages import Message, Tool

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<tool_response>", "</tool_response>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

QWEN_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
QWEN_TOOLS_TAIL = "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "


@dataclass(frozen=True)
class ParsedCall:
    """A tool call as sampled: ``arguments`` is JSON text, re-serialised from what was sampled."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedTurn:
    """What a sampled turn says. ``malformed`` counts tool-call spans that are no valid call; they stay in the text."""

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]
    malformed: int


class TokenizerUnfit(ValueError):
    """The tokenizer lacks a token that the renderer needs."""


class ChatMLRenderer:
    """Qwen3-style ChatML.

    ``compact_tools`` lists tools by name only (``Tools: a, b.``), for policies whose context is too small for
    JSON schemas; otherwise the tools are written as Qwen3's template writes them.
    """

    def __init__(self, tokenizer_file: Path, *, compact_tools: bool = False) -> None:
        text = tokenizer_file.read_text(encoding="utf-8")
        self.tokenizer = Tokenizer.from_str(text)
        plain = json.loads(text)
        plain["added_tokens"] = []  # so that text which spells a special token is tokenised as text
        self._plain = Tokenizer.from_str(json.dumps(plain))
        self._compact = compact_tools
        self.im_start, self.im_end = self._special(IM_START), self._special(IM_END)
        self.call_open, self.call_close = self._special(CALL_OPEN), self._special(CALL_CLOSE)
        self.response_open, self.response_close = self._special(RESPONSE_OPEN), self._special(RESPONSE_CLOSE)
        self.think_open, self.think_close = self._special(THINK_OPEN), self._special(THINK_CLOSE)
        self.stop_token_ids = (self.im_end,)
        self.vocab_size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self._newline = self.text("\n")
        self._assistant = [self.im_start, *self.text("assistant\n")]

    def text(self, text: str) -> list[int]:
        """Plain text to ids; special spellings included, no special id comes out."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def root(self, system: Message | None, tools: Sequence[Tool]) -> list[int]:
        """The block that opens a conversation: system text and tools; empty when there is neither."""
        parts = [system.content] if system is not None and system.content else []
        ids: list[int] = []
        if tools and self._compact:
            parts.append("Tools: " + ", ".join(tool.name for tool in tools) + ".")
        if parts:
            ids = self.text("\n\n".join(parts))
        if tools and not self._compact:
            ids += self._qwen_tools(tools, first=not parts)
        return [self.im_start, *self.text("system\n"), *ids] if ids else []

    def message(self, previous: Message | None, message: Message, *, closed: bool = False) -> list[int]:
        """The block of ``message`` after ``previous``.

        ``previous`` is None at the very start only; after a root block that isn't empty it is a system message.

        ``closed``: the previous block is a sampled turn that already ends with the end-of-turn token.
        """
        ids = self._closing(previous, message, closed=closed)
        if message.role == "tool":
            if previous is None or previous.role != "tool":
                ids += [self.im_start, *self.text("user")]
            ids += [*self._newline, self.response_open, *self.text("\n")]
            return [*ids, *self.text(message.content), *self._newline, self.response_close]
        if message.role == "assistant":
            return ids + self._assistant + self._assistant_body(message)
        return [*ids, self.im_start, *self.text(message.role + "\n"), *self.text(message.content)]

    def generation_prompt(self, previous: Message | None, *, closed: bool = False) -> list[int]:
        """What stands between the last block and the first sampled token."""
        return self._closing(previous, None, closed=closed) + self._assistant

    def parse(self, output_ids: Sequence[int]) -> ParsedTurn:
        """Read a sampled turn. Every id is accounted for in the text, the reasoning or a call."""
        ids = list(output_ids)
        if ids and ids[-1] == self.im_end:
            ids.pop()
        reasoning = ""
        if ids and ids[0] == self.think_open:
            end = ids.index(self.think_close) if self.think_close in ids else len(ids)
            reasoning = self._decode(ids[1:end]).strip("\n")
            ids = ids[end + 1 :]
        text: list[int] = []
        calls: list[ParsedCall] = []
        malformed = 0
        closes = [place for place, token in enumerate(ids) if token == self.call_close]
        position = 0
        while position < len(ids):
            if ids[position] == self.call_open:
                later = bisect_right(closes, position)
                end = closes[later] if later < len(closes) else -1
                call = self._call(ids[position + 1 : end]) if end > 0 else None
                if call is not None:
                    calls.append(call)
                    position = end + 1
                    continue
                malformed += 1
            text.append(ids[position])
            position += 1
        return ParsedTurn(self._decode(text).strip("\n"), reasoning, tuple(calls), malformed)

    def _call(self, ids: list[int]) -> ParsedCall | None:
        """The call in a span. A look at its start spares decoding what a degenerate policy repeats."""
        start = self._decode(ids[:8]).lstrip()
        return _parse_call(self._decode(ids)) if not start or start.startswith("{") else None

    def _closing(self, previous: Message | None, following: Message | None, *, closed: bool) -> list[int]:
        if previous is None:
            return []
        if previous.role == "tool" and following is not None and following.role == "tool":
            return []  # consecutive tool results share one user turn
        return [*self._newline] if closed else [self.im_end, *self._newline]

    def _assistant_body(self, message: Message) -> list[int]:
        ids: list[int] = []
        if message.reasoning:
            ids += [self.think_open, *self.text("\n" + message.reasoning + "\n"), self.think_close]
            ids += self.text("\n\n")
        ids += self.text(message.content)
        for position, call in enumerate(message.tool_calls):
            if position or message.content:
                ids += self._newline
            name = json.dumps(call.name, ensure_ascii=False)
            ids += [self.call_open, *self.text(f'\n{{"name": {name}, "arguments": {call.arguments}}}\n')]
            ids.append(self.call_close)
        return ids

    def _qwen_tools(self, tools: Sequence[Tool], *, first: bool) -> list[int]:
        ids = self.text(("" if first else "\n\n") + QWEN_TOOLS_HEAD)
        for tool in tools:
            ids += self.text("\n" + json.dumps({"type": "function", "function": tool.model_dump()}, ensure_ascii=False))
        ids += self.text(QWEN_TOOLS_TAIL)
        ids += [self.call_open, self.call_close, *self.text(" XML tags:\n"), self.call_open]
        ids += self.text('\n{"name": <function-name>, "arguments": <args-json-object>}\n')
        return [*ids, self.call_close]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _special(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise TokenizerUnfit(f"the tokenizer has no token {token!r}; the ChatML renderer needs it")
        return int(found)


def _parse_call(text: str) -> ParsedCall | None:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # a policy may sample any nesting
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict) or not value["name"].isprintable():
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    if not _encodable(written):  # lone surrogates: only their escapes can be sent
        written = json.dumps(arguments)
    return ParsedCall(value["name"], written)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
