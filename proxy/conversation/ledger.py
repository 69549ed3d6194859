"""One episode's tree of messages and the exact token ids behind each: token in, token out.

Invariant: the tokens of a path only grow at the end. A message that is known keeps the ids that were rendered or
sampled for it when it first appeared; nothing known is ever tokenised again, and what the policy sampled is never
re-rendered. An assistant turn is recognised by the ids that the proxy minted, else by its canonical content; one
that came back in part keeps the sampled ids of that part; one that the policy never said is rendered and counted as
synthetic. Planning a request changes nothing: what is new joins the tree when the call is recorded.

The ledger does no I/O. It knows messages, token ids and call numbers; it knows neither HTTP nor Redis nor engines.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import xxhash

from infra.chat.messages import Message, Tool
from infra.chat.renderer import Renderer
from proxy.conversation import canonical
from proxy.conversation.lineage import Continued
from proxy.conversation.requests import ModelRequest
from proxy.conversation.turn_notes import NodeNote, TurnNote, message_key, message_of, note_of
from trajectory.records import CallRecord

_SYSTEM = Message(role="system")


@dataclass(eq=False, slots=True)
class Node:
    """One block of a conversation: the root, a message, or a sampled turn (generation prompt and output)."""

    parent: Node | None
    message: Message | None
    """None for the root."""
    key: bytes
    ids: array[int]
    """int32: a million tokens cost 4 MB."""
    end: int
    """Tokens from the start of the conversation to the end of this node."""
    depth: int
    """Nodes from the root to this one, both included."""
    closed: bool = False
    """A sampled turn whose last token is the end of turn."""
    synthetic: bool = False
    """An assistant turn that the policy never said."""
    rewritten: bool = False
    """A copy of a sampled turn under another prefix, with its text changed."""
    said: int = -1
    """The call that sampled this turn, whether under this prefix or another; -1 for anything else."""
    partial: bool = False
    """Only the beginning of the turn that ``said`` sampled."""
    own: bool = False
    """The turn as it was sampled, under its own prefix."""
    twin: Node | None = None
    """The sibling with which this node shares its leading ids, to the end of the shorter of the two."""
    call: int = -1
    """A recorded call whose tokens contain this node; -1 for none."""
    header: int = 0
    """Leading ids that are the generation prompt, of a turn that the policy sampled."""
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

    known: Node | None
    """The last node of the path that is in the tree."""
    new: tuple[tuple[Node, bool], ...]
    """Nodes to add below it, each with whether the text of a known turn had been rewritten."""
    aliases: tuple[tuple[Node, bytes, Node, bool], ...]
    """Other forms in which known turns were sent: parent, key of the form, turn, whether its text was rewritten."""
    leaf: Node
    header: array[int]
    prompt: array[int]
    """int32[p]: the whole prompt, generation prompt included."""
    turns: tuple[Continued, ...]
    """Sampled turns on the path, in order."""
    mutated: bool
    """An earlier turn came back with its text rewritten."""
    synthetic: int
    """Assistant turns in the prompt that the policy never said."""
    synthetic_after: bool
    """One of them stands after the last sampled turn."""


@dataclass(frozen=True)
class Delta:
    """A plan against the recorded calls: ``prompt == tokens(parent)[:kept] + prompt_ids``."""

    parent: int
    kept: int
    prompt_ids: array[int]
    depth: int
    """Nodes shared with the parent's path."""
    added: tuple[Node, ...]
    """What the call adds to that path."""

    @property
    def notes(self) -> list[NodeNote]:
        return [_note(node) for node in self.added]

    @property
    def messages(self) -> list[Message]:
        return [node.message for node in self.added if node.message is not None]


class Ledger:
    def __init__(self, renderer: Renderer) -> None:
        self.turns: list[Node] = []
        """The sampled turn of each recorded call."""
        self._renderer = renderer
        self._roots: dict[bytes, Node] = {}
        self._minted: dict[str, Node] = {}
        """Tool-call and turn ids -> the turn that got them."""
        self._said: dict[bytes, Node] = {}

    def plan(self, request: ModelRequest) -> Plan:
        """Match a request to its longest known path and render what is new. Changes nothing."""
        known = self._roots.get(request.root)
        new: list[tuple[Node, bool]] = []
        aliases: list[tuple[Node, bytes, Node, bool]] = []
        if known is None:
            ids = array("i", self._renderer.root(request.system, request.tools))
            node = Node(None, None, request.root, ids, len(ids), 1)
            new.append((node, False))
        else:
            node = known
        mutated = False
        for message, key in zip(request.messages, request.keys, strict=True):
            found = node.children.get(key)
            if found is None:
                found = self._grow(node, key, message, request.tools)
                if found[0].own:
                    aliases.append((node, key, *found))
                else:
                    new.append(found)
            if not new:
                known = found[0]
            mutated |= found[1]
            node = found[0]
        header = self._header(node)
        turns, synthetic, synthetic_after = _turns(node)
        return Plan(
            known=known,
            new=tuple(new),
            aliases=tuple(aliases),
            leaf=node,
            header=header,
            prompt=_tokens(node) + header,
            turns=turns,
            mutated=mutated,
            synthetic=synthetic,
            synthetic_after=synthetic_after,
        )

    def refreshed(self, plan: Plan) -> Plan:
        """The same plan on the tree as it is now: another call may have added some of its nodes meanwhile."""
        known, new = plan.known, list(plan.new)
        while new:
            node = new[0][0]
            if known is None:
                there = self._roots.get(node.key)
            else:
                there = found[0] if (found := known.children.get(node.key)) else None
            if there is None or there.ids != node.ids:
                break
            known = there
            new.pop(0)
        if new:
            new[0][0].parent = known
        leaf = new[-1][0] if new else known
        assert leaf is not None  # a plan has at least its root
        return replace(plan, known=known, new=tuple(new), leaf=leaf)

    def acknowledge(self, plan: Plan) -> None:
        """The turns on the path have reached the harness: it used them."""
        for step in plan.leaf.path():
            step.acknowledged = True

    def delta(self, plan: Plan) -> Delta:
        """A refreshed plan as an addition to what is recorded by now."""
        added: list[Node] = []
        known: Node | None = plan.leaf
        while known is not None and known.call < 0:
            added.append(known)
            known = known.parent
        added.reverse()
        parent, kept = -1, 0
        if known is not None:
            parent, kept = known.call, known.end
            twin = added[0].twin if added else None
            if not added and known.samples:
                parent, kept = known.samples[-1].said, known.end + len(plan.header)
            elif twin is not None and twin.call >= 0:
                parent, kept = twin.call, min(twin.end, added[0].end)
        return Delta(parent, kept, plan.prompt[kept:], 0 if known is None else known.depth, tuple(added))

    def commit(self, plan: Plan, message: Message, output_ids: array[int]) -> Node:
        """Add a refreshed plan and the turn of the call that has just been recorded; it gets the next call number."""
        for node, rewritten in plan.new:
            if node.parent is None:
                self._roots[node.key] = node
            else:
                node.parent.children[node.key] = (node, rewritten)
        for parent, key, turn, rewritten in plan.aliases:
            parent.children.setdefault(key, (turn, rewritten))
        seq = len(self.turns)
        for step in plan.leaf.path():
            if step.call >= 0:
                break
            step.call = seq
        return self._sampled(plan.leaf, message, plan.header, output_ids)

    def restore(self, record: CallRecord, note: TurnNote) -> tuple[Node, list[Message]]:
        """Add a recorded call from its record and note; calls come in order. The inverse of delta and commit.

        Returns its turn and the messages that it added.
        """
        parent = self.turns[record.parent] if record.parent >= 0 else None
        full = (_tokens(parent)[: record.kept] if parent is not None else array("i")) + _ids(record.prompt_bytes)
        node = next(step for step in parent.path() if step.depth == note.depth) if parent and note.depth else None
        messages = []
        for added in note.nodes:
            node = self._restored(node, added, full)
            if node.message is not None:
                messages.append(node.message)
        assert node is not None  # a first call always adds its root
        for step in node.path():
            step.call = record.seq if step.call < 0 else step.call
            step.acknowledged = True
        turn = self._sampled(node, message_of(note.message), full[node.end :], _ids(record.output_bytes))
        return turn, messages

    def _grow(self, node: Node, key: bytes, message: Message, tools: tuple[Tool, ...]) -> tuple[Node, bool]:
        """The node below ``node`` for a message in a form that has not been seen there before."""
        if message.role == "assistant":
            if (copied := self._copied(node, key, message, tools)) is not None:
                return copied
        elif (base := _extended(node, message)) is not None and base.message is not None:
            more = self._renderer.text(message.content[len(base.message.content) :])
            child = _child(node, key, message, base.ids + array("i", more))
            child.twin = base
            return child, False
        ids = array("i", self._renderer.message(_previous(node), message, closed=node.closed))
        child = _child(node, key, message, ids)
        child.synthetic = message.role == "assistant"
        return child, False

    def _copied(self, node: Node, key: bytes, message: Message, tools: tuple[Tool, ...]) -> tuple[Node, bool] | None:
        """The sampled turn that an assistant message is, wholly or in part; None if the policy never said it."""
        said, calls = self._recognise(node, message)
        if said is None or said.message is None:
            return None
        rewritten = canonical.rewritten(said.message, message, tools) if calls is None else False
        if said.parent is node and calls is None:
            return said, rewritten
        output = said.ids[said.header :]
        if calls is not None:
            cut = self._renderer.parse(output).cuts[calls]
            if not cut:  # nothing is left of it, or it cannot be cut between two tokens
                return None
            output = output[:cut]
        header = self._header(node)
        copy = _child(node, key, message, header + output)
        copy.header, copy.said, copy.partial, copy.rewritten = len(header), said.said, calls is not None, rewritten
        copy.closed = said.closed and calls is None
        if said.parent is node:
            copy.twin = said
        return copy, rewritten

    def _recognise(self, node: Node, message: Message) -> tuple[Node | None, int | None]:
        """The turn that was sampled, and how many of its calls are left where it came back in part."""
        names = [message.turn_id, *(call.id for call in message.tool_calls)]
        said = next((turn for name in names if (turn := self._minted.get(name)) is not None), None)
        if said is not None and said.message is not None:
            was = said.message
            if {(c.id, c.name) for c in was.tool_calls} == {(c.id, c.name) for c in message.tool_calls}:
                return said, None
            kept = canonical.kept_calls(was, message)
            return (None, None) if kept is None else (said, kept)
        wanted = _said_key(message)
        equal: list[Node] = []
        for sample in reversed(node.samples):
            if sample.message is None:
                continue
            if _said_key(sample.message) == wanted:
                if sample.message.reasoning == message.reasoning:
                    return sample, None
                equal.append(sample)
                continue
            shorter = bool(sample.message.tool_calls) and not message.tool_calls
            if shorter and (kept := canonical.kept_calls(sample.message, message)) is not None:
                return sample, kept
        if equal:
            return equal[0], None
        return (self._said.get(wanted) if any(canonical.said_key(message)) else None), None

    def _sampled(self, leaf: Node, message: Message, header: array[int], output: array[int]) -> Node:
        seq = len(self.turns)
        turn = _child(leaf, message_key(message), message, header + output)
        turn.closed = bool(output) and output[-1] in self._renderer.stop_token_ids
        turn.header, turn.said, turn.call, turn.own = len(header), seq, seq, True
        leaf.samples.append(turn)
        leaf.children[turn.key] = (turn, False)
        for name in (message.turn_id, *(call.id for call in message.tool_calls)):
            if name:
                self._minted[name] = turn
        self._said[_said_key(message)] = turn
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
        child = _child(node, key, message, ids)
        child.closed, child.synthetic, child.rewritten = added.closed, added.synthetic, added.rewritten
        child.said, child.partial = added.said, added.partial
        node.children[key] = (child, added.rewritten)
        return child

    def _header(self, node: Node) -> array[int]:
        return array("i", self._renderer.generation_prompt(_previous(node), closed=node.closed))


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


def _turns(leaf: Node) -> tuple[tuple[Continued, ...], int, bool]:
    """Sampled turns on the path in order, how many were never sampled, and whether one of those comes last."""
    turns: list[Continued] = []
    synthetic, after = 0, False
    for step in leaf.path():
        if step.synthetic:
            synthetic += 1
            after |= not turns
        elif step.said >= 0:
            turns.append(Continued(step.said, step.own, not step.partial))
    return tuple(reversed(turns)), synthetic, after


def _ids(data: bytes) -> array[int]:
    ids = array("i")
    ids.frombytes(data)
    return ids


def _note(node: Node) -> NodeNote:
    message = None if node.message is None else note_of(node.message)
    root = node.key if node.message is None else b""
    return NodeNote(node.end, message, root, node.synthetic, node.rewritten, node.closed, node.said, node.partial)


def _extended(node: Node, message: Message) -> Node | None:
    """The recorded user message that ``message`` continues with a new line: its ids are kept, never re-merged."""
    found: Node | None = None
    if message.role != "user":
        return None
    for child, _ in node.children.values():
        if child.call < 0 or child.message is None:
            continue
        if child.message.role != "user" or child.message.joined != message.joined:
            continue
        text = child.message.content
        longer = found is None or found.message is None or len(text) > len(found.message.content)
        if longer and message.content.startswith(text) and message.content[len(text) : len(text) + 1] == "\n":
            found = child
    return found


def _said_key(message: Message) -> bytes:
    return xxhash.xxh3_128_digest("\0".join(canonical.said_key(message)).encode("utf-8", "surrogatepass"))
