"""The nodes of an episode's tree: blocks of a conversation with their exact token ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from infra.chat.messages import Message
from proxy.conversation.stored_turns import StoredNode, stored_message


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
    sampled_by: int = -1
    """The call that sampled this turn, whether under this prefix or another; -1 for anything else."""
    partial: bool = False
    """Only the beginning of the turn that ``sampled_by`` sampled."""
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

    def tokens(self) -> array[int]:
        """int32: from the start of the conversation to the end of this node."""
        tokens = array("i")
        for node in reversed(list(self.path())):
            tokens.extend(node.ids)
        return tokens

    def child(self, key: bytes, message: Message, ids: array[int]) -> Node:
        """A node below this one, which doesn't know of it yet."""
        return Node(self, message, key, ids, self.end + len(ids), self.depth + 1)

    def stored(self) -> StoredNode:
        message, root = (None, self.key) if self.message is None else (stored_message(self.message), b"")
        flags = (self.synthetic, self.rewritten, self.closed)
        return StoredNode(self.end, message, root, *flags, self.sampled_by, self.partial)

    def continued_by(self, message: Message) -> Node | None:
        """The longest recorded user message here that ``message`` continues with a new line."""
        longest: Node | None = None
        length = -1
        for node, _ in self.children.values():
            if node.call < 0 or node.message is None or message.role != "user":
                continue
            text = node.message.content
            if (node.message.role, node.message.joined) != (message.role, message.joined) or len(text) <= length:
                continue
            if message.content.startswith(text) and message.content[len(text) : len(text) + 1] == "\n":
                longest, length = node, len(text)
        return longest


def new_root(key: bytes, ids: array[int]) -> Node:
    return Node(None, None, key, ids, len(ids), 1)
