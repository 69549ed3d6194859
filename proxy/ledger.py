"""One episode's tree of messages and the exact token ids behind each: token in, token out.

Invariant: the tokens of a path only grow at the end. A message that is known keeps the ids that were rendered or
sampled for it when it first appeared; nothing known is ever tokenised again, and what the policy sampled is never
re-rendered. An assistant turn is recognised by the tool-call ids that the proxy minted, else by its canonical
content; one that the policy never said is rendered and counted as synthetic.

The ledger does no I/O. It knows messages, token ids and call numbers; it knows neither HTTP nor Redis nor engines.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from infra.chat.messages import Message, Tool
from infra.chat.renderer import ChatMLRenderer
from proxy.notes import NodeNote, TurnNote, message_key, message_of, note_of, root_key
from trajectory.records import CallRecord

Tokens = array  # of type "i": int32, so that a million tokens cost 4 MB
_SYSTEM = Message(role="system")


@dataclass(eq=False, slots=True)
class Node:
    """One block of a conversation: the root, a message, or a sampled turn (generation prompt and output)."""

    parent: Node | None
    message: Message | None
    """None for the root."""
    key: bytes
    ids: array[int]
    end: int
    """Tokens from the start of the conversation to the end of this node."""
    depth: int
    """Nodes from the root to this one, both included."""
    closed: bool = False
    """A sampled turn whose last token is the end of turn."""
    synthetic: bool = False
    rewritten: bool = False
    """A sampled turn that was copied here from another prefix with its text changed."""
    extends: Node | None = None
    """The sibling whose text this message continues and whose ids it begins with."""
    call: int = -1
    """A recorded call whose tokens contain this node; -1 for none."""
    seq: int = -1
    """The call that sampled this turn; -1 unless it is a sampled turn under its own prefix."""
    header: int = 0
    """Leading ids that are the generation prompt (of a turn that the policy sampled, also of its copies)."""
    acknowledged: bool = False
    """A later request used this sampled turn."""
    children: dict[bytes, tuple[Node, bool]] = field(default_factory=dict)
    """Message as sent -> (node, whether its text had been rewritten)."""
    samples: list[Node] = field(default_factory=list)

    def path(self) -> Iterator[Node]:
        """This node, its parent, and so on to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True)
class Plan:
    """What a request comes to: the node it ends with and the tokens to sample from."""

    leaf: Node
    header: array[int]
    prompt: array[int]
    """int32[p]: the whole prompt, generation prompt included."""
    mutated: bool
    """An earlier turn came back with its text rewritten."""
    synthetic: int
    """Assistant turns in the prompt that the policy never said."""


@dataclass(frozen=True)
class Delta:
    """A plan against the recorded calls: ``prompt == tokens(parent)[:kept] + prompt_ids``."""

    parent: int
    kept: int
    prompt_ids: array[int]
    depth: int
    """Nodes shared with the parent's path."""
    nodes: list[NodeNote]


class Ledger:
    def __init__(self, renderer: ChatMLRenderer) -> None:
        self.turns: list[Node] = []
        """The sampled turn of each recorded call."""
        self._renderer = renderer
        self._roots: dict[bytes, Node] = {}
        self._minted: dict[str, Node] = {}
        self._said: dict[tuple[str, ...], Node] = {}

    def plan(self, messages: Sequence[Message], tools: tuple[Tool, ...]) -> Plan:
        """Match a request to its longest known path and render what is new."""
        system = messages[0] if messages[0].role == "system" else None
        node = self._root(system, tools)
        mutated = False
        for message in messages[0 if system is None else 1 :]:
            key = message_key(message)
            known = node.children.get(key)
            if known is None:
                known = node.children[key] = self._grow(node, key, message)
            node = known[0]
            mutated |= known[1]
        synthetic = 0
        for step in node.path():
            synthetic += step.synthetic
            step.acknowledged = True
        header = self._header(node)
        return Plan(node, header, _tokens(node) + header, mutated, synthetic)

    def delta(self, plan: Plan) -> Delta:
        """The plan as an addition to what is recorded by now."""
        new: list[Node] = []
        known: Node | None = plan.leaf
        while known is not None and known.call < 0:
            new.append(known)
            known = known.parent
        new.reverse()
        parent, kept = -1, 0
        if known is not None:
            parent, kept = known.call, known.end
            if not new and known.samples:
                parent, kept = known.samples[-1].seq, known.end + len(plan.header)
            elif new and (sibling := new[0].extends) is not None and sibling.call >= 0:
                parent, kept = sibling.call, sibling.end
        return Delta(
            parent, kept, plan.prompt[kept:], 0 if known is None else known.depth, [_note(node) for node in new]
        )

    def commit(self, plan: Plan, message: Message, output_ids: array[int]) -> Node:
        """Add the turn of the call that has just been recorded; it gets the next call number."""
        seq = len(self.turns)
        for step in plan.leaf.path():
            if step.call >= 0:
                break
            step.call = seq
        return self._sampled(plan.leaf, message, plan.header, output_ids, seq)

    def restore(self, record: CallRecord, note: TurnNote) -> Node:
        """Add a recorded call from its record and note; calls come in order. The inverse of delta and commit."""
        parent = self.turns[record.parent] if record.parent >= 0 else None
        full = (_tokens(parent)[: record.kept] if parent is not None else array("i")) + _ids(record.prompt_bytes)
        node = next(step for step in parent.path() if step.depth == note.depth) if parent and note.depth else None
        for added in note.nodes:
            node = self._restored(node, added, full)
        assert node is not None  # a first call always adds its root
        for step in node.path():
            step.call = record.seq if step.call < 0 else step.call
            step.acknowledged = True
        message = message_of(note.message)
        return self._sampled(node, message, full[node.end :], _ids(record.output_bytes), record.seq)

    def _root(self, system: Message | None, tools: tuple[Tool, ...]) -> Node:
        key = root_key(system, tools)
        root = self._roots.get(key)
        if root is None:
            ids = array("i", self._renderer.root(system, tools))
            root = self._roots[key] = Node(None, None, key, ids, len(ids), 1)
        return root

    def _grow(self, node: Node, key: bytes, message: Message) -> tuple[Node, bool]:
        """The child of ``node`` for a message in a form that has not been seen there before."""
        said = self._recognise(node, message) if message.role == "assistant" else None
        if said is not None and said.message is not None:
            rewritten = _rewritten(said.message, message)
            if said.parent is node:
                return said, rewritten
            header = self._header(node)
            ids = header + said.ids[said.header :]
            copy = self._child(node, key, message, ids)
            copy.closed, copy.header, copy.rewritten = said.closed, len(header), rewritten
            return copy, rewritten
        base = _extended(node, message)
        if base is not None and base.message is not None:
            ids = base.ids + array("i", self._renderer.text(message.content[len(base.message.content) :]))
        else:
            ids = array("i", self._renderer.message(_previous(node), message, closed=node.closed))
        child = self._child(node, key, message, ids)
        child.extends = base
        child.synthetic = message.role == "assistant"
        return child, False

    def _recognise(self, node: Node, message: Message) -> Node | None:
        """The sampled turn that an assistant message is, or None if the policy never said it."""
        said = next((self._minted[call.id] for call in message.tool_calls if call.id in self._minted), None)
        if said is not None and said.message is not None:
            # A turn of which the harness kept only some calls is not the turn that was sampled.
            same = {(c.id, c.name) for c in said.message.tool_calls} == {(c.id, c.name) for c in message.tool_calls}
            return said if same else None
        wanted = _canonical(message)
        for sample in reversed(node.samples):
            if sample.message is not None and _canonical(sample.message) == wanted:
                return sample
        return self._said.get(wanted) if any(wanted) else None

    def _sampled(self, leaf: Node, message: Message, header: array[int], output: array[int], seq: int) -> Node:
        turn = self._child(leaf, message_key(message), message, header + output)
        turn.closed = bool(output) and output[-1] == self._renderer.im_end
        turn.header, turn.seq, turn.call = len(header), seq, seq
        leaf.samples.append(turn)
        leaf.children[turn.key] = (turn, False)
        for call in message.tool_calls:
            self._minted[call.id] = turn
        self._said[_canonical(message)] = turn
        self.turns.append(turn)
        return turn

    def _restored(self, node: Node | None, added: NodeNote, full: array[int]) -> Node:
        ids = full[0 if node is None else node.end : added.end]
        if added.message is None:
            root = self._roots.get(added.root)
            if root is None or root.ids != ids:
                root = self._roots[added.root] = Node(None, None, added.root, ids, added.end, 1)
            return root
        assert node is not None  # only a root has no parent
        message = message_of(added.message)
        key = message_key(message)
        known = node.children.get(key)
        if known is not None and known[0].ids == ids:
            return known[0]
        child = self._child(node, key, message, ids)
        child.closed, child.synthetic, child.rewritten = added.closed, added.synthetic, added.rewritten
        node.children[key] = (child, added.rewritten)
        return child

    def _header(self, node: Node) -> array[int]:
        return array("i", self._renderer.generation_prompt(_previous(node), closed=node.closed))

    @staticmethod
    def _child(node: Node, key: bytes, message: Message, ids: array[int]) -> Node:
        return Node(node, message, key, ids, node.end + len(ids), node.depth + 1)


def _previous(node: Node) -> Message | None:
    if node.message is not None:
        return node.message
    return _SYSTEM if node.ids else None


def _tokens(node: Node) -> array[int]:
    full = array("i")
    for step in reversed(list(node.path())):
        full.extend(step.ids)
    return full


def _ids(data: bytes) -> array[int]:
    ids = array("i")
    ids.frombytes(data)
    return ids


def _note(node: Node) -> NodeNote:
    message = None if node.message is None else note_of(node.message)
    root = node.key if node.message is None else b""
    return NodeNote(node.end, message, root, node.synthetic, node.rewritten, node.closed)


def _extended(node: Node, message: Message) -> Node | None:
    """The recorded user message that ``message`` continues with a new line: its ids are kept, never re-merged."""
    found: Node | None = None
    if message.role != "user":
        return None
    for child, _ in node.children.values():
        if child.call < 0 or child.message is None or child.message.role != "user":
            continue
        text = child.message.content
        longer = found is None or found.message is None or len(text) > len(found.message.content)
        if longer and message.content.startswith(text) and message.content[len(text) : len(text) + 1] == "\n":
            found = child
    return found


def _canonical(message: Message) -> tuple[str, ...]:
    """What an assistant turn says, without what harnesses are known to rewrite (reasoning may be left out)."""
    parts = [message.content.strip()]
    for call in message.tool_calls:
        parts += [call.name, _canonical_arguments(call.arguments)]
    return tuple(parts)


def _canonical_arguments(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text.strip()


def _rewritten(said: Message, sent: Message) -> bool:
    """Whether the harness changed what the turn says; leaving out its reasoning is no change."""
    reasoning = not sent.reasoning or sent.reasoning.strip() == said.reasoning.strip()
    calls = [(call.name, call.arguments) for call in said.tool_calls]
    same = said.content.strip() == sent.content.strip() and calls == [(c.name, c.arguments) for c in sent.tool_calls]
    return not (same and reasoning)
