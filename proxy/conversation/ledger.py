"""One episode's tree of messages and the exact token ids behind each: token in, token out.

Invariant: the tokens of a path only grow at the end. A message that is known keeps the ids that were rendered or
sampled for it when it first appeared; nothing known is ever tokenised again, and what the policy sampled is never
re-rendered. Planning a request changes nothing: what is new joins the tree when the call is recorded.

What a message is, below the node with which the request so far ends; the first row that fits. `test_ledger_paths.py`
has a test of each row's name.

| row | what is seen | what it is |
|---|---|---|
| `known_message` | a form that was seen here before | the same node: the same ids |
| `longer_user_message` | a recorded user message, a new line, and more | its ids, then those of the rest |
| `new_text` | other text of the user, the system or a tool | rendered |
| `minted_id` | a turn with an id that the proxy minted, and all its calls | that turn; `mutated` if its text changed |
| `first_calls_only` | such a turn with its first calls only | the sampled ids up to there, `partial` |
| `other_calls` | such a turn with other calls than its first | never said |
| `same_content` | without such an id, what a turn sampled here says | that turn: of several the one that thought so |
| `text_without_calls` | without an id, the text of a turn sampled here | the sampled ids up to its calls, `partial` |
| `content_elsewhere` | without an id, what a turn sampled anywhere says | a copy of that turn |
| `other_prefix` | a turn that was sampled under another prefix | a copy: the same ids, as context |
| `never_said` | any other turn of the assistant | rendered, counted as `synthetic` |

What a call adds to those that are recorded:

| row | what is seen | `parent` and `kept` |
|---|---|---|
| `nothing_recorded` | no node of the path is recorded | -1, 0 |
| `sampled_again` | all are, and a turn was sampled below the last | the latest such call, with its generation prompt |
| `shared_beginning` | the first new node has the first ids of a sibling | the sibling's call, as far as they agree |
| `goes_on` | anything else | the call of the last recorded node, to that node's end |

The ledger does no I/O. It knows messages, token ids and call numbers; it knows neither HTTP nor Redis nor engines.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import xxhash

from infra.chat.messages import Message, Tool
from infra.chat.renderer import Renderer
from proxy.conversation import canonical
from proxy.conversation.lineage import Continued, Lineage, Place
from proxy.conversation.requests import ModelRequest
from proxy.conversation.stored_turns import StoredNode, StoredTurn, message_key, message_of
from proxy.conversation.tree import Node, new_root
from trajectory.records import CallRecord

_SYSTEM = Message(role="system")


@dataclass(frozen=True)
class PlannedCall:
    """What a request comes to: where it belongs, the tokens to sample from, and what it adds to the recorded calls.

    ``prompt == tokens(parent)[:kept] + prompt_ids``
    """

    place: Place
    prompt: array[int]
    """int32[p]: the whole prompt, generation prompt included."""
    header: array[int]
    """The generation prompt."""
    turns: tuple[Continued, ...]
    """Sampled turns on the path, in order."""
    mutated: bool
    """An earlier turn came back with its text rewritten."""
    synthetic: int
    """Assistant turns in the prompt that the policy never said."""
    parent: int
    """The recorded call that it continues, -1 for none."""
    kept: int
    """Leading tokens of the parent's that it keeps."""
    shared: int
    """Nodes shared with the parent's path."""
    added: tuple[Node, ...]
    """What it adds to that path."""
    known: Node | None
    """The last node of the path that is in the tree."""
    new: tuple[tuple[Node, bool], ...]
    """Nodes to add below it, each with whether the text of a known turn had been rewritten."""
    aliases: tuple[tuple[Node, bytes, Node, bool], ...]
    """Other forms in which known turns were sent: parent, key of the form, turn, whether its text was rewritten."""
    leaf: Node
    """The node with which the request ends."""

    @property
    def prompt_ids(self) -> array[int]:
        return self.prompt[self.kept :]

    def acknowledge(self) -> None:
        """The turns on the path have reached the harness: it used them."""
        for node in self.leaf.path():
            node.acknowledged = True


class Ledger:
    """The calls of one episode so far."""

    def __init__(self, renderer: Renderer) -> None:
        self.turns: list[Node] = []
        """The sampled turn of each recorded call."""
        self._lineage = Lineage()
        self._renderer = renderer
        self._roots: dict[bytes, Node] = {}
        self._minted: dict[str, Node] = {}
        """Tool-call and turn ids -> the turn that got them."""
        self._by_content: dict[bytes, Node] = {}

    def plan(self, request: ModelRequest, running: Collection[str] = ()) -> PlannedCall:
        """Match a request to its longest known path, place it, and render what is new. Changes nothing.

        ``running``: agents of the episode's calls that are being sampled.
        """
        known = self._roots.get(request.root)
        new: list[tuple[Node, bool]] = []
        aliases: list[tuple[Node, bytes, Node, bool]] = []
        if known is None:
            node = new_root(request.root, array("i", self._renderer.root(request.system, request.tools)))
            new.append((node, False))
        else:
            node = known
        mutated = False
        for message, key in zip(request.messages, request.keys, strict=True):
            step = node.children.get(key)
            if step is None:
                step = self._grow(node, key, message, request.tools)
                if step[0].own:
                    aliases.append((node, key, *step))
                else:
                    new.append(step)
            if not new:
                known = step[0]
            mutated |= step[1]
            node = step[0]
        header = self._header(node)
        turns, synthetic, synthetic_after = _turns(node)
        parent, kept, shared, added = _delta(node, len(header))
        return PlannedCall(
            place=self._lineage.place(request, turns, synthetic_after, running=running),
            prompt=node.tokens() + header,
            header=header,
            turns=turns,
            mutated=mutated,
            synthetic=synthetic,
            parent=parent,
            kept=kept,
            shared=shared,
            added=added,
            known=known,
            new=tuple(new),
            aliases=tuple(aliases),
            leaf=node,
        )

    def refreshed(self, planned: PlannedCall) -> PlannedCall:
        """The same on the tree as it is now: other calls, recorded meanwhile, may have added some of its nodes."""
        known, new = planned.known, list(planned.new)
        while new:
            node = new[0][0]
            there = self._roots.get(node.key) if known is None else known.children.get(node.key, (None, False))[0]
            if there is None or there.ids != node.ids:
                break
            known = there
            new.pop(0)
        if new:
            new[0][0].parent = known
        leaf = new[-1][0] if new else known
        assert leaf is not None  # a plan has at least its root
        parent, kept, shared, added = _delta(leaf, len(planned.header))
        return replace(
            planned, known=known, new=tuple(new), leaf=leaf, parent=parent, kept=kept, shared=shared, added=added
        )

    def commit(self, planned: PlannedCall, record: CallRecord, stored: StoredTurn) -> Node:
        """Add a refreshed plan and its turn: it has just been recorded, as the next call. Returns the turn."""
        for node, rewritten in planned.new:
            if node.parent is None:
                self._roots[node.key] = node
            else:
                node.parent.children[node.key] = (node, rewritten)
        for parent, key, turn, rewritten in planned.aliases:
            parent.children.setdefault(key, (turn, rewritten))
        return self._recorded(planned.leaf, planned.added, planned.header, record, stored)

    def restore(self, record: CallRecord, stored: StoredTurn) -> Node:
        """Add a call from its record and stored turn; calls come in order. Returns its turn, as ``commit`` does."""
        parent = self.turns[record.parent] if record.parent >= 0 else None
        full = (parent.tokens()[: record.kept] if parent is not None else array("i")) + _ids(record.prompt_bytes)
        node = next(step for step in parent.path() if step.depth == stored.depth) if parent and stored.depth else None
        added = []
        for stored_node in stored.nodes:
            node = self._restored(node, stored_node, full)
            added.append(node)
        assert node is not None  # a first call always adds its root
        for step in node.path():
            step.acknowledged = True
        return self._recorded(node, added, full[node.end :], record, stored)

    def _recorded(
        self, leaf: Node, added: Sequence[Node], header: array[int], record: CallRecord, stored: StoredTurn
    ) -> Node:
        """The turn of the next call, below the leaf of its request."""
        for node in leaf.path():
            if node.call >= 0:
                break
            node.call = record.seq
        message, output = message_of(stored.message), _ids(record.output_bytes)
        turn = leaf.child(message_key(message), message, header + output)
        turn.closed = bool(output) and output[-1] in self._renderer.stop_token_ids
        turn.header, turn.sampled_by, turn.call, turn.own = len(header), record.seq, record.seq, True
        leaf.samples.append(turn)
        leaf.children[turn.key] = (turn, False)
        for name in (message.turn_id, *(call.id for call in message.tool_calls)):
            if name:
                self._minted[name] = turn
        self._by_content[_content_key(message)] = turn
        self.turns.append(turn)
        messages = [node.message for node in added if node.message is not None]
        self._lineage.observe(record, messages, message, stored.name)
        return turn

    def _grow(self, node: Node, key: bytes, message: Message, tools: tuple[Tool, ...]) -> tuple[Node, bool]:
        """The node below ``node`` for a message in a form that has not been seen there before."""
        if message.role == "assistant":
            if (copied := self._copied(node, key, message, tools)) is not None:
                return copied
        elif (base := node.continued_by(message)) is not None and base.message is not None:
            more = self._renderer.text(message.content[len(base.message.content) :])
            child = node.child(key, message, base.ids + array("i", more))
            child.twin = base
            return child, False
        ids = array("i", self._renderer.message(_previous(node), message, closed=node.closed))
        child = node.child(key, message, ids)
        child.synthetic = message.role == "assistant"
        return child, False

    def _copied(self, node: Node, key: bytes, message: Message, tools: tuple[Tool, ...]) -> tuple[Node, bool] | None:
        """The sampled turn that an assistant message is, wholly or in part; None if the policy never said it."""
        sampled, calls = self._recognise(node, message)
        if sampled is None or sampled.message is None:
            return None
        rewritten = canonical.rewritten(sampled.message, message, tools) if calls is None else False
        if sampled.parent is node and calls is None:
            return sampled, rewritten
        output = sampled.ids[sampled.header :]
        if calls is not None:
            cut = self._renderer.parse(output).cuts[calls]
            if not cut:  # nothing is left of it, or it cannot be cut between two tokens
                return None
            output = output[:cut]
        header = self._header(node)
        copy = node.child(key, message, header + output)
        copy.header, copy.sampled_by = len(header), sampled.sampled_by
        copy.partial, copy.rewritten = calls is not None, rewritten
        copy.closed = sampled.closed and calls is None
        if sampled.parent is node:
            copy.twin = sampled
        return copy, rewritten

    def _recognise(self, node: Node, message: Message) -> tuple[Node | None, int | None]:
        """The turn that was sampled, and how many of its calls are left where it came back in part."""
        names = [message.turn_id, *(call.id for call in message.tool_calls)]
        sampled = next((turn for name in names if (turn := self._minted.get(name)) is not None), None)
        if sampled is not None and sampled.message is not None:
            was = sampled.message
            if {(c.id, c.name) for c in was.tool_calls} == {(c.id, c.name) for c in message.tool_calls}:
                return sampled, None
            kept = canonical.kept_calls(was, message)
            return (None, None) if kept is None else (sampled, kept)
        wanted = _content_key(message)
        equal: list[Node] = []
        for sample in reversed(node.samples):
            if sample.message is None:
                continue
            if _content_key(sample.message) == wanted:
                if sample.message.reasoning == message.reasoning:
                    return sample, None
                equal.append(sample)
                continue
            shorter = bool(sample.message.tool_calls) and not message.tool_calls
            if shorter and (kept := canonical.kept_calls(sample.message, message)) is not None:
                return sample, kept
        if equal:
            return equal[0], None
        return (self._by_content.get(wanted) if any(canonical.said_key(message)) else None), None

    def _restored(self, node: Node | None, stored: StoredNode, full: array[int]) -> Node:
        ids = full[0 if node is None else node.end : stored.end]
        if stored.message is None:
            root = self._roots.get(stored.root)
            if root is None or root.ids != ids:
                root = self._roots[stored.root] = new_root(stored.root, ids)
            return root
        assert node is not None  # only a root has no parent
        message = message_of(stored.message)
        key = message_key(message)
        known = node.children.get(key)
        if known is not None and known[0].ids == ids:
            return known[0]
        child = node.child(key, message, ids)
        child.closed, child.synthetic, child.rewritten = stored.closed, stored.synthetic, stored.rewritten
        child.sampled_by, child.partial = stored.sampled_by, stored.partial
        node.children[key] = (child, stored.rewritten)
        return child

    def _header(self, node: Node) -> array[int]:
        return array("i", self._renderer.generation_prompt(_previous(node), closed=node.closed))


def _previous(node: Node) -> Message | None:
    if node.message is not None:
        return node.message
    return _SYSTEM if node.ids else None


def _turns(leaf: Node) -> tuple[tuple[Continued, ...], int, bool]:
    """Sampled turns on the path in order, how many were never sampled, and whether one of those comes last."""
    turns: list[Continued] = []
    synthetic, after = 0, False
    for step in leaf.path():
        if step.synthetic:
            synthetic += 1
            after |= not turns
        elif step.sampled_by >= 0:
            turns.append(Continued(step.sampled_by, step.own, not step.partial))
    return tuple(reversed(turns)), synthetic, after


def _delta(leaf: Node, header: int) -> tuple[int, int, int, tuple[Node, ...]]:
    """``parent``, ``kept``, ``shared`` and ``added`` of a call that ends with a leaf and a generation prompt of so many
    tokens."""
    added: list[Node] = []
    known: Node | None = leaf
    while known is not None and known.call < 0:
        added.append(known)
        known = known.parent
    added.reverse()
    if known is None:
        return -1, 0, 0, tuple(added)
    parent, kept = known.call, known.end
    twin = added[0].twin if added else None
    if not added and known.samples:
        parent, kept = known.samples[-1].sampled_by, known.end + header
    elif twin is not None and twin.call >= 0:
        parent, kept = twin.call, min(twin.end, added[0].end)
    return parent, kept, known.depth, tuple(added)


def _ids(data: bytes) -> array[int]:
    ids = array("i")
    ids.frombytes(data)
    return ids


def _content_key(message: Message) -> bytes:
    return xxhash.xxh3_128_digest("\0".join(canonical.said_key(message)).encode("utf-8", "surrogatepass"))
