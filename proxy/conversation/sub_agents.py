"""Which tool call started a sub-agent: its prompt is, word for word, an argument of a call that waits for its answer.

Of equal calls the first that has no agent yet is taken, so that equal sub-agents side by side are told apart. An agent
that was found by its call is named after it, so that the names alone tell which calls have theirs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import orjson
import xxhash

from infra.chat.messages import Message
from trajectory.kinds import ROOT_AGENT

DEEPEST: Final = 4
"""Nesting of tool arguments down to which a prompt is looked for."""

TaskCall = tuple[int, int]
"""A tool call that may have started a sub-agent: ``seq`` of the call that sampled it, and its number in that turn."""

_MINTED = re.compile(r"\d+\.\d+|~[0-9a-f]+", re.ASCII)
_UNFIT = re.compile(r"[^A-Za-z0-9_.:-]")


class TaskCalls:
    """The tool calls of one episode and the agents that they started."""

    def __init__(self) -> None:
        self._open: dict[str, TaskCall] = {}
        """Ids of tool calls that are not answered."""
        self._answered: set[TaskCall] = set()
        self._with: dict[bytes, list[TaskCall]] = {}
        """Hash of a string argument -> the tool calls that have it."""
        self._started: set[TaskCall] = set()
        self._agents: dict[int, str] = {}
        """Whose a call is, of those whose turn calls tools."""

    def answered(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.role == "tool" and (asked := self._open.pop(message.tool_call_id, None)) is not None:
                self._answered.add(asked)

    def observe(self, seq: int, agent: str, turn: Message) -> None:
        """A call was recorded: what its agent is named after has started it, and its turn may start others."""
        if (own := task_call_of(agent)) is not None:
            self._started.add(own)
        if turn.tool_calls:
            self._agents[seq] = agent
        for index, call in enumerate(turn.tool_calls):
            self._open[call.id] = (seq, index)
            for key in {_key(text) for text in _strings(call.arguments)}:
                self._with.setdefault(key, []).append((seq, index))

    def find(
        self, messages: Sequence[Message], running: Collection[str], *, late: bool = True
    ) -> tuple[TaskCall | None, bool]:
        """The tool call that has one of these messages' texts as an argument, and whether it has no agent.

        ``running``: names of agents that have their calls though nothing is recorded of them. ``late``: also take a
        call without an agent that is answered: an agent in the background may ask for the first time after that.
        """
        if not self._with:
            return None, False
        equal = [asked for m in messages if m.role == "user" for asked in self._with.get(_key(m.content.strip()), ())]
        free = [asked for asked in equal if asked not in self._started and self.name(asked) not in running]
        waiting = [asked for asked in free if asked not in self._answered]
        if waiting:
            return min(waiting), True
        shared = [asked for asked in equal if asked not in self._answered]
        if shared:
            return max(shared), False
        return (min(free), True) if free and late else (None, False)

    def asker(self, asked: TaskCall) -> str:
        """The agent that made a tool call."""
        return self._agents[asked[0]]

    def name(self, asked: TaskCall) -> str:
        """The agent that a tool call started."""
        return f"{self.asker(asked)}/{asked[0]}.{asked[1]}"

    def finished(self, agent: str) -> bool:
        """The tool call that started the agent is answered, as far as it is known."""
        return task_call_of(agent) in self._answered


def task_call_of(agent: str) -> TaskCall | None:
    """The tool call that an agent is named after."""
    last = agent.rpartition("/")[2]
    if not is_minted(last) or last.startswith("~"):
        return None
    seq, index = last.split(".")
    return int(seq), int(index)


def is_minted(last: str) -> bool:
    """Whether the last part of an agent's name was minted here, rather than the harness's id."""
    return _MINTED.fullmatch(last) is not None


def hinted_id(name: str) -> str:
    """A harness's id of a sub-agent as the last part of its name; "" for the main agent."""
    name = name.strip("/ ")
    if name in ("", ROOT_AGENT):
        return ""
    fit = _UNFIT.sub("-", name)[:64]
    return f"id-{fit}" if is_minted(fit) else fit


def _key(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


def _strings(arguments: str) -> Iterator[str]:
    """The texts among a tool call's arguments, without the blanks around them."""
    try:
        left: list[tuple[Any, int]] = [(orjson.loads(arguments), 0)]
    except ValueError:
        return
    while left:
        value, depth = left.pop()
        if isinstance(value, str):
            if text := value.strip():
                yield text
        elif depth < DEEPEST and isinstance(value, dict | list):
            left += [(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value)]
