"""Whether a stock chat template is append-only: conversations that show it, and the construct that breaks it.

A template passes a probe when everything said in it is rendered, and the prompt of each call, followed by the turn
that answered it, stays as it was in the prompt of the next. Invariant: a refusal names the probe that broke, and the
construct in the template as far as it can be found: a condition that, decided beforehand, would mend the probe, else
the lines that look ahead or strip.

It knows nothing of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from infra.chat.jinja import ChatTemplate, TemplateRefuses

Sent = Mapping[str, Any]
"""A message as chat templates take it."""
_MARKS = re.compile(
    r"loop\.(last|revindex0?|nextitem|length)\b|\[::\s*-1\]|\|\s*(reverse|last)\b|messages\[-\d+\]|messages\s*\|\s*length"
    r"|last_\w*index|split\(\s*['\"]</?think|reasoning_content|raise_exception"
)


_TALKS = {
    "thinking kept": "u r u r u",
    "thinking kept between tool calls": "s u r1 t r1 t r u",
    "plain turns": "u a u a u",
    "parallel calls": "u a2 t t a2 t t u",
    "mid-conversation system": "s u s a s u a1 t s",
    "consecutive user turns": "u u a u u",
}
"""Probe -> its messages: a user's, a system's, a tool's, an answer with that many calls, the same with reasoning."""
_ROLES = {"u": "user", "s": "system", "t": "tool"}


class TemplateUnfit(ValueError):
    """A stock chat template can't be used; the message names the construct."""


@dataclass(frozen=True)
class Probe:
    name: str
    messages: tuple[Sent, ...]
    tools: tuple[Sent, ...]
    words: tuple[str, ...]
    """What a rendering of the whole must contain."""


def probes(say: Callable[[str, str, list[Sent]], Sent], thinks: bool) -> list[Probe]:
    """The conversations that a template has to pass.

    ``say(content, reasoning, calls)`` is an assistant's message. ``thinks``: the template opens every turn's reasoning,
    so that every turn has one.
    """
    count = iter(range(1000))

    def word(kind: str) -> str:
        return f"{kind}{next(count):03d}w"

    def message(sign: str) -> Sent:
        if sign in _ROLES:
            return {"role": _ROLES[sign], "content": word(_ROLES[sign])}
        called: list[Sent] = [
            {"id": word("id"), "type": "function", "function": {"name": "look", "arguments": {"at": word("argument")}}}
            for _ in range(int(sign[1:] or 0))
        ]
        return say(word("answer"), word("reasoning") if thinks or sign[0] == "r" else "", called)

    parameters = {"type": "object", "properties": {"at": {"type": "string", "description": "parameter000w"}}}
    tool = {"type": "function", "function": {"name": "look", "description": "tool000w", "parameters": parameters}}
    conversations = []
    for name, signs in _TALKS.items():
        messages = [message(sign) for sign in signs.split()]
        words = re.findall(r"[a-z]+\d{3}w", repr(messages).replace("\\n", " "))
        spoken = tuple(word for word in words if not word.startswith("id"))
        conversations.append(Probe(name, tuple(messages), (), spoken))
        with_tools = (*spoken, "tool000w", "parameter000w")
        conversations.append(Probe(f"{name}, with tools", tuple(messages), (tool,), with_tools))
    return conversations


def check_probe(template: ChatTemplate, probe: Probe) -> None:
    """Raises TemplateUnfit, naming probe and construct, when the template isn't append-only on it."""
    broken = _broken(template, probe)
    if broken is None:
        return
    culprits = [
        f"line {condition.line}: {condition.text}"
        for index, condition in enumerate(template.conditions)
        for value in (True, False)
        if _broken(template.forcing(index, value), probe) is None
    ]
    # Deciding what kind of message it is may mend a probe too; what looks ahead is the likelier cause.
    culprits = [culprit for culprit in culprits if _MARKS.search(culprit)] or culprits
    if culprits:
        named = "it would hold if this condition were always decided alike: " + " | ".join(dict.fromkeys(culprits))
    else:
        named = _suspects(template.source, probe, broken)
    raise TemplateUnfit(f"probe {probe.name!r}: {broken}; {named}")


def _broken(template: ChatTemplate, probe: Probe) -> str | None:
    """What is wrong with the template on a probe, or None."""
    calls = [
        count
        for count in range(1, len(probe.messages) + 1)
        if probe.messages[count - 1]["role"] != "assistant"
        and (count == len(probe.messages) or probe.messages[count]["role"] == "assistant")
    ]
    try:
        prompts = [template.render(probe.messages[:count], probe.tools, prompted=True) for count in calls]
        whole = template.render(probe.messages, probe.tools, prompted=True)
        turns = [template.render(probe.messages[: count + 1], probe.tools) for count in calls[:-1]]
    except TemplateRefuses as error:
        return f"the template raises {str(error)!r}"
    missing = [word for word in probe.words if word not in whole]
    if missing:
        return f"not rendered: {_kinds(missing)}"
    for earlier, later in [*pairwise(prompts), *zip(prompts, turns, strict=False)]:
        if not later.startswith(earlier):
            return "the prompt of an earlier call changes later, " + _difference(earlier, later)
    for count, turn, later in zip(calls, turns, prompts[1:], strict=False):
        answer = probe.messages[count]["content"]
        up_to_answer = turn[: turn.rindex(answer) + len(answer)]
        if not later.startswith(up_to_answer):
            return "an earlier turn changes later, " + _difference(up_to_answer, later)
    return None


def _difference(earlier: str, later: str) -> str:
    place = common_length(earlier, later)
    begin = max(0, place - 20)
    return f"from {earlier[begin : place + 40]!r} to {later[begin : place + 40]!r}"


def common_length(*texts: str) -> int:
    """Characters that all texts begin with."""
    shortest = min(map(len, texts))
    return next((place for place in range(shortest) if len({text[place] for text in texts}) > 1), shortest)


def _kinds(words: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(re.sub(r"\d{3}w$", "", word) for word in words))


def _suspects(source: str, probe: Probe, broken: str) -> str:
    if "not rendered" in broken and probe.tools and not re.search(r"\btools\b", source):
        return "the template never uses `tools`"
    if "argument" in broken and "tool_calls" not in source:
        return "the template never uses `tool_calls`"
    lines = [
        f"line {number}: {line.strip()}" for number, line in enumerate(source.splitlines(), 1) if _MARKS.search(line)
    ]
    if not lines:
        return "no line of the template looks ahead; it depends on the whole conversation in another way"
    return "lines that look ahead, strip or raise: " + " | ".join(lines[:4])
