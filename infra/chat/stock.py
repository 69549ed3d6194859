"""A stock Hugging Face chat template as a renderer, for policies of no known family.

The template is rendered on short conversations of placeholders, once, to learn what stands between two messages;
blocks are then put together from that, so that text is never seen by the template and stays text. A template is taken
only if that gives, on every probe, what the template itself renders.

Invariant: the same as every renderer's. It knows calls spelled ``<tool_call>{json}</tool_call>`` only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from infra.chat.jinja import ChatTemplate, TemplateRefuses
from infra.chat.messages import Message, Tool, ToolCall
from infra.chat.probes import Probe, Sent, TemplateUnfit, check_probe, common_length, probes
from infra.chat.reading import ParsedTurn, read_turn
from infra.chat.tokens import Part, Vocabulary

HERE, THERE = "gyrehere0", "gyrethere0"
_CALL = {"id": "gyrecall0", "type": "function", "function": {"name": "look", "arguments": {}}}
_BEFORE: dict[str, list[Sent]] = {
    "user": [{"role": "user", "content": HERE}],
    "system": [{"role": "user", "content": "a"}, {"role": "system", "content": HERE}],
    "assistant": [{"role": "user", "content": "a"}, {"role": "assistant", "content": HERE}],
    "tool": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": HERE, "tool_call_id": "gyrecall0"},
    ],
}
_PROMPT = "generation prompt"


class StockRenderer:
    family = "stock"

    def __init__(self, tokenizer_file: Path, source: str, variables: Mapping[str, Any]) -> None:
        """Raises TemplateUnfit, naming the construct, for a template that isn't append-only on every probe, and
        TokenizerUnfit. ``variables``: what the template may use beside messages and tools (``bos_token``).
        """
        self.vocabulary = Vocabulary(tokenizer_file)
        self.vocab_size = self.vocabulary.size
        self.text, self.decode = self.vocabulary.text, self.vocabulary.decode
        self.template = source
        try:
            self._template = ChatTemplate(source, variables)
            prompt = self._template.render(_BEFORE["user"], prompted=True)
        except TemplateRefuses as error:
            raise TemplateUnfit(f"the template raises on a lone user message: {error}") from error
        self._thinking = prompt.rstrip().endswith("<think>")
        self._knows_reasoning = "reasoning_content" in source
        conversations = probes(self._assistant, self._thinking)
        for probe in conversations:
            check_probe(self._template, probe)
        try:
            self._learn()
            for probe in conversations:
                self._check_blocks(probe)
            self._check_reading()
        except TemplateRefuses as error:
            raise TemplateUnfit(f"the template raises on an order of roles that harnesses have: {error}") from error
        self.stop_token_ids = (self.im_end,)

    def root(self, system: Message | None, tools: Sequence[Tool]) -> list[int]:
        return self.vocabulary.ids(self._root(system, tools))

    def message(self, previous: Message | None, message: Message, *, closed: bool = False) -> list[int]:
        if message.role != "assistant":
            return self.vocabulary.ids(self._block(previous, message, closed))
        # apart, so that the body is tokenised as it would be after a generation prompt
        opening = self.vocabulary.ids(self._opening(previous, closed))
        return opening + self.vocabulary.ids(self._body(message))

    def generation_prompt(self, previous: Message | None, *, closed: bool = False) -> list[int]:
        return self.vocabulary.ids(self._between(previous, _PROMPT, closed))

    def parse(self, output_ids: Sequence[int]) -> ParsedTurn:
        return read_turn(self.vocabulary.pieces(output_ids, self.im_end), thinking=self._thinking)

    def _root(self, system: Message | None, tools: Sequence[Tool]) -> list[Part]:
        opening: list[Sent] = [{"role": "system", "content": system.content}] if system and system.content else []
        described = [{"type": "function", "function": msgspec.structs.asdict(tool)} for tool in tools]
        guarded, restore = self._guard(json.dumps([opening, described], ensure_ascii=False))
        messages, schemas = json.loads(guarded)
        rendered = self._template.render([*messages, {"role": "user", "content": HERE}], schemas)
        head = rendered[: rendered.rindex(HERE)]
        after_system = self._spell(self._rest["system"]["user"])
        if head.endswith(after_system):
            return restore(head.removesuffix(after_system))
        if opening or tools or head != self._start:
            raise TemplateUnfit("what the template opens a conversation with isn't a turn of its own")
        return []

    def _block(self, previous: Message | None, message: Message, closed: bool) -> list[Part]:
        if message.role == "assistant":
            return [*self._opening(previous, closed), *self._body(message)]
        if message.joined and previous is not None and previous.role == message.role != "tool":
            return ["\n", message.content]
        return [*self._between(previous, message.role, closed), message.content, *self._tail[message.role]]

    def _opening(self, previous: Message | None, closed: bool) -> list[Part]:
        """Of an assistant's turn that wasn't sampled."""
        prompt = self._between(previous, _PROMPT, closed)
        if not self._thinking:
            return prompt
        # that prompt opens the reasoning, which the body holds
        return self.vocabulary.structure(self._spell(prompt).rsplit("<think>", 1)[0])

    def _between(self, previous: Message | None, following: str, closed: bool) -> list[Part]:
        if previous is None and following == "user":
            return self.vocabulary.structure(self._start)
        # A conversation that begins in another way is written as if a user's turn had ended before it.
        role, closed = ("user", True) if previous is None else (previous.role, closed)
        return self._rest[role][following][1 if closed else 0 :]

    def _body(self, message: Message) -> list[Part]:
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _arguments(c.arguments)}}
            for c in message.tool_calls
        ]
        guarded, restore = self._guard(json.dumps([message.content, message.reasoning, calls], ensure_ascii=False))
        content, reasoning, sent = json.loads(guarded)
        lead = self._template.render(_BEFORE["user"], prompted=True)
        if self._thinking:
            lead = lead.rsplit("<think>", 1)[0]
        whole = self._template.render([*_BEFORE["user"], self._assistant(content, reasoning, sent)])
        if not whole.startswith(lead):
            raise TemplateUnfit("what the template writes before an assistant's turn isn't the generation prompt")
        end = self._spell(self._rest["assistant"]["user"][:1])
        return restore(whole[len(lead) : whole.rindex(end)])

    def _assistant(self, content: str, reasoning: str, calls: list[Sent]) -> Sent:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning and self._knows_reasoning:
            message["reasoning_content"] = reasoning
        elif reasoning:
            message["content"] = f"<think>\n{reasoning}\n</think>\n\n{content}"
        return message | ({"tool_calls": calls} if calls else {})

    def _learn(self) -> None:
        """What stands between a message of one role and one of another, or the generation prompt."""
        after: dict[str, dict[str, str]] = {}
        for role, before in _BEFORE.items():
            after[role] = {_PROMPT: self._after(self._template.render(before, prompted=True))}
            for following in ("user", "system", "tool"):
                more: Sent = {"role": following, "content": THERE, "tool_call_id": "gyrecall0"}
                text = self._after(self._template.render([*before, more]))
                if THERE not in text:
                    raise TemplateUnfit(f"the template drops a {following} message after one of role {role}")
                after[role][following] = text[: text.index(THERE)]
        ends = self.vocabulary.structure(after["assistant"]["user"])
        if not ends or not isinstance(ends[0], int):
            raise TemplateUnfit(f"turns don't end with a special token but with {after['assistant']['user']!r}")
        self.im_end = ends[0]
        self._rest: dict[str, dict[str, list[Part]]] = {}
        self._tail: dict[str, list[Part]] = {}
        for role, texts in after.items():
            common = self.vocabulary.structure(texts[_PROMPT][: common_length(*texts.values())])
            if self.im_end in common:
                common = common[: common.index(self.im_end)]
            while common and isinstance(common[-1], str):  # what follows might not be cut there by every template
                common.pop()
            length = len(self._spell(common))
            self._tail[role] = common
            self._rest[role] = {name: self.vocabulary.structure(text[length:]) for name, text in texts.items()}
        rendered = self._template.render(_BEFORE["user"])
        self._start = rendered[: rendered.index(HERE)]

    @staticmethod
    def _after(rendered: str) -> str:
        return rendered[rendered.rindex(HERE) + len(HERE) :]

    def _check_blocks(self, probe: Probe) -> None:
        """Raises TemplateUnfit when blocks don't add up to what the template renders."""
        tools = tuple(Tool(**tool["function"]) for tool in probe.tools)
        system = Message(role="system", content=probe.messages[0]["content"])
        leads = probe.messages[0]["role"] == "system"
        parts = self._root(system if leads else None, tools)
        previous = Message(role="system") if parts else None
        for count, sent in enumerate(probe.messages, 1):
            if leads and count == 1:
                continue
            message = _message(sent, self._knows_reasoning)
            parts = [*parts, *self._block(previous, message, False)]
            previous = message
            last = count == len(probe.messages) or probe.messages[count]["role"] == "assistant"
            if message.role != "assistant" and last:
                ours = self._spell([*parts, *self._between(previous, _PROMPT, False)])
                theirs = self._template.render(probe.messages[:count], probe.tools, prompted=True)
                if ours != theirs:
                    place = common_length(ours, theirs)
                    raise TemplateUnfit(
                        f"probe {probe.name!r}: what the template writes for a message depends on more than the one "
                        f"before it: it gives {theirs[max(0, place - 20) : place + 40]!r}, part by part "
                        f"{ours[max(0, place - 20) : place + 40]!r}"
                    )

    def _check_reading(self) -> None:
        call = ToolCall(id="gyrecall0", name="look", arguments='{"at": "x"}')
        sample = Message(role="assistant", content="here", reasoning="because", tool_calls=(call, call))
        parts = self._body(sample)
        if self._thinking:
            parts = self.vocabulary.structure(self._spell(parts).removeprefix("<think>"))
        turn = self.parse(self.vocabulary.ids(parts))
        read = (turn.content, turn.reasoning, [(each.name, each.arguments) for each in turn.calls])
        if read != ("here", "because", [(call.name, call.arguments)] * 2):
            raise TemplateUnfit(
                "turns as the template writes them can't be read: gyre knows <think>…</think> and "
                f"<tool_call>{{json}}</tool_call>, the template writes {self._spell(parts)!r}"
            )

    def _spell(self, parts: Sequence[Part]) -> str:
        names = {token_id: token for token, token_id in self.vocabulary.added.items()}
        return "".join(part if isinstance(part, str) else names[part] for part in parts)

    def _guard(self, text: str) -> tuple[str, Callable[[str], list[Part]]]:
        """Text with what spells special tokens hidden from the template, and how what it renders is read back."""
        free = (chr(place) for place in range(0xE000, 0xF900) if chr(place) not in text)
        hidden = {token: next(free) for token in self.vocabulary.added if token in text}
        for token in sorted(hidden, key=len, reverse=True):
            text = text.replace(token, hidden[token])

        def restore(rendered: str) -> list[Part]:
            parts = self.vocabulary.structure(rendered)
            for token, sign in hidden.items():
                parts = [part.replace(sign, token) if isinstance(part, str) else part for part in parts]
            return parts

        return text, restore


def _arguments(text: str) -> Any:
    """As templates expect them: an object, or what a harness wrote where that is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _message(sent: Sent, knows_reasoning: bool) -> Message:
    """A probe's message as the renderer gets it."""
    content, reasoning = sent["content"], sent.get("reasoning_content", "")
    if not knows_reasoning and content.startswith("<think>\n"):
        reasoning, content = content.removeprefix("<think>\n").split("\n</think>\n\n")
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"]))
        for call in sent.get("tool_calls", ())
    )
    return Message(role=sent["role"], content=content, reasoning=reasoning, tool_calls=calls)
