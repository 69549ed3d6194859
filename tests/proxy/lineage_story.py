"""Tells an episode call by call, as a harness would lead it, and keeps its records: the ledger's part in plain lists.

Every message counts ten tokens, and a turn that comes back in part the first five of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from infra.chat.messages import Message, Tool, ToolCall
from proxy.conversation.lineage import Continued, Lineage, Place
from proxy.conversation.requests import Hints, ModelRequest
from trajectory.kinds import classify
from trajectory.records import FIRST_HASH, CallRecord, encode, make_record, record_hash

BASH = Tool(name="bash", parameters={"type": "object", "properties": {"command": {"type": "string"}}})
TASK = Tool(name="task", parameters={"type": "object", "properties": {"prompt": {"type": "string"}}})
TOOLS = (BASH, TASK)


def user(text: str, *, joined: bool = False) -> Message:
    return Message(role="user", content=text, joined=joined)


def results(turn: Message, text: str = "ok") -> list[Message]:
    return [Message(role="tool", content=f"{text} {call.id}", tool_call_id=call.id) for call in turn.tool_calls]


def cut(turn: Message, calls: int = 0) -> Message:
    return msgspec.structs.replace(turn, tool_calls=turn.tool_calls[:calls])


@dataclass
class Asked:
    """A request that was placed and is being sampled."""

    request: ModelRequest
    path: list[Continued]
    synthetic_after: bool
    place: Place


@dataclass
class Story:
    lineage: Lineage = field(default_factory=Lineage)
    records: list[CallRecord] = field(default_factory=list)
    notes: list[tuple[list[Message], Message, bytes]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    """All requests, in the order in which they were placed."""
    paths: list[list[Any]] = field(default_factory=list)
    """Nodes of each call: the root, (key, message) of each message, (said, call) of each turn."""

    def ask(
        self,
        messages: Sequence[Message],
        *,
        system: str = "be brief",
        tools: tuple[Tool, ...] = TOOLS,
        running: Sequence[str] = (),
        **hints: Any,
    ) -> Asked:
        """A request arrives and is placed."""
        request = ModelRequest(
            model="m",
            system=Message(role="system", content=system),
            messages=tuple(messages),
            tools=tools,
            max_tokens=None,
            stream=True,
            hints=Hints(**hints),
        )
        nodes = self._nodes(request)
        path = [c for node in nodes if (c := self._continued(node)) is not None]
        after = False
        for node in nodes[1:]:
            after = node[0] == "synthetic" or (after and node[0] not in ("said", "part", "copy"))
        asked = Asked(request, path, after, self.lineage.place(request, path, after, running=running))
        self.asked.append(asked)
        return asked

    def answer(self, asked: Asked, text: str = "", *calls: tuple[str, dict[str, Any]]) -> Message:
        """The turn is sampled and the call recorded; returns what the harness gets."""
        seq, place = len(self.records), asked.place
        turn = Message(
            role="assistant",
            content=text,
            turn_id=f"turn-{seq}",
            tool_calls=tuple(
                ToolCall(id=f"call-{seq}-{i}", name=name, arguments=msgspec.json.encode(arguments).decode())
                for i, (name, arguments) in enumerate(calls)
            ),
        )
        nodes = [*self._nodes(asked.request), ("said", seq)]
        parent, shared, part = -1, 0, 0
        for earlier, path in enumerate(self.paths):
            common = next((i for i, (a, b) in enumerate(zip(path, nodes, strict=False)) if a != b), None)
            common = min(len(path), len(nodes)) if common is None else common
            inside = 5 * (common < min(len(path), len(nodes)) and nodes[common][:2] == ("part", path[common][1]))
            if common and (common, inside) >= (shared, part):
                parent, shared, part = earlier, common, inside
        prompt = 10 * (len(nodes) - 1 - shared) - part
        record = make_record(
            episode="e",
            seq=seq,
            prev=record_hash(encode(self.records[-1])) if self.records else FIRST_HASH,
            agent=place.agent,
            parent=parent,
            kept=10 * shared + part,
            prompt_ids=[1] * prompt,
            output_ids=[2] * 10,
            logprobs=[-1.0] * 10,
            versions=[0] * 10,
            temperature=1.0,
            finish_reason="stop",
            cells=["a"],
            started_at=0.0,
            active_s=0.0,
            held_s=0.0,
            side=place.side,
            summary=place.summary,
            compacts=place.compacts,
            tools=bool(asked.request.tools),
            fork=place.fork,
        )
        added = [m for node, m in zip(nodes[1:], asked.request.messages, strict=False) if node not in nodes[:shared]]
        self.records.append(record)
        self.paths.append(nodes)
        self.places.append(place)
        self.notes.append((added, turn, asked.request.name))
        self.lineage.observe(record, *self.notes[-1])
        return turn

    def call(
        self, messages: Sequence[Message], text: str = "", *calls: tuple[str, dict[str, Any]], **how: Any
    ) -> Message:
        return self.answer(self.ask(messages, **how), text, *calls)

    def rebuilt(self, calls: int | None = None) -> Lineage:
        """The lineage as another proxy makes it of the first so many records and notes."""
        lineage = Lineage()
        for record, noted in list(zip(self.records, self.notes, strict=True))[:calls]:
            lineage.observe(record, *noted)
        return lineage

    @property
    def forks(self) -> list[str]:
        return [place.fork for place in self.places]

    @property
    def agents(self) -> list[str]:
        return [place.agent for place in self.places]

    @property
    def kinds(self) -> dict[int, str]:
        return {leaf.seq: str(leaf.kind) for leaf in classify(self.records)}

    @property
    def disagreements(self) -> list[str]:
        return [text for place in self.places for text in place.disagreements]

    def _nodes(self, request: ModelRequest) -> list[Any]:
        nodes: list[Any] = [("root", request.root)]
        turns = {noted[1].turn_id: (seq, noted[1]) for seq, noted in enumerate(self.notes)}
        for message, key in zip(request.messages, request.keys, strict=True):
            if message.role != "assistant":
                nodes.append(("text", key))
            elif message.turn_id not in turns:
                nodes.append(("synthetic", key))
            else:
                seq, said = turns[message.turn_id]
                whole = len(said.tool_calls) == len(message.tool_calls)
                own = self.paths[seq][:-1] == nodes
                nodes.append(
                    ("said", seq) if whole and own else ("copy", seq, len(nodes)) if whole else ("part", seq, key)
                )
        return nodes

    @staticmethod
    def _continued(node: Any) -> Continued | None:
        if node[0] not in ("said", "copy", "part"):
            return None
        return Continued(node[1], node[0] == "said", node[0] != "part")
