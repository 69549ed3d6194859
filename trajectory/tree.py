"""The radix tree of an episode: every token that its calls ever had, once, in columns.

Invariant: two calls share a node exactly as far as their token sequences are equal, and each sampled token of the
episode is one column entry that names the first call that sampled it. What else was sampled onto an entry that
was already sampled (identical parallel samples) is counted in ``duplicates``.

The tree branches at token level and a call always ends at the end of a node, so whatever is true of a path is
true of whole nodes. It does not know what a path is for (``kinds``) or which paths are trained (``selection``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trajectory.columns import SAMPLED, Bool, Columns, Float32, Int32
from trajectory.records import CallRecord, RecordError

ROOT = 0
"""The node without tokens that every path starts from."""


@dataclass(frozen=True, eq=False)
class EpisodeTree:
    """Columns over the episode's n unique tokens, m nodes over the columns, c calls that end at nodes."""

    episode: str
    ids: Int32
    """int32[n]: token ids."""
    sampled: Bool
    """bool[n]: the policy sampled this token; everything else was written by a renderer or a harness."""
    behaviour: Float32
    """float32[n]: behaviour log-probability, 0 where not sampled."""
    version: Int32
    """int32[n]: weight version that sampled the token, -1 where not sampled."""
    temperature: Float32
    """float32[n]: sampling temperature, 1 where not sampled."""
    call: Int32
    """int32[n]: ``seq`` of the call that sampled the token, -1 where not sampled."""
    offset: Int32
    """int32[n]: index of the token in that call's output, -1 where not sampled."""
    start: Int32
    """int32[m]: first column entry of each node."""
    end: Int32
    """int32[m]: one past the last column entry of each node."""
    parent: Int32
    """int32[m]: parent node, -1 for ``ROOT``. A parent may have a higher number than its child."""
    depth: Int32
    """int32[m]: tokens on the path before the node."""
    call_node: Int32
    """int32[c]: the node at whose end each call ends."""
    duplicates: int
    """Sampled tokens of calls that an earlier call had already sampled at the same place."""

    @classmethod
    def from_records(cls, records: Sequence[CallRecord]) -> EpisodeTree:
        """The tree of one episode's records, in ``seq`` order from 0.

        Raises RecordError when the records are not one complete episode, when one keeps more tokens than its
        parent has, or when sampled tokens lack a prompt, a finite log-prob or a version.
        """
        builder = _Builder(sum((len(r.prompt_bytes) + len(r.output_bytes)) // 4 for r in records))
        for position, record in enumerate(records):
            _check(record, position, records[0].episode)
            builder.add(record)
        return builder.build(records[0].episode if records else "")

    def nodes(self, node: int) -> list[int]:
        """The nodes from the first below ``ROOT`` down to ``node``."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]

    def sampled_per_node(self) -> list[int]:
        """Sampled tokens of each of the m nodes."""
        spans = zip(self.start.tolist(), self.end.tolist(), strict=True)
        return [int(np.count_nonzero(self.sampled[start:end])) for start, end in spans]


def _check(record: CallRecord, position: int, episode: str) -> None:
    def refuse(why: str) -> RecordError:
        return RecordError(f"episode {record.episode}: call {record.seq} {why}")

    if record.episode != episode:
        raise refuse(f"is among the records of episode {episode}")
    if record.seq != position:
        raise refuse(f"stands at position {position}: records are missing or out of order")
    if not -1 <= record.parent < record.seq:
        raise refuse(f"continues call {record.parent}, which is not an earlier call")
    if record.kept < 0 or (record.parent == -1 and record.kept):
        raise refuse(f"keeps {record.kept} tokens of call {record.parent}")
    sampled = len(record.output_bytes)
    if not sampled == len(record.logprob_bytes) == len(record.version_bytes):
        raise refuse("has per-token columns of different lengths")
    if sampled % 4 or len(record.prompt_bytes) % 4:
        raise refuse("has columns that are not whole 32-bit values")
    if sampled and not record.kept and not record.prompt_bytes:
        raise refuse("sampled tokens without any prompt")
    if not np.isfinite(record.logprobs).all():
        raise refuse("has a behaviour log-prob that is not finite")


def _common(a: Int32, b: Int32) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    if not length:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


class _Builder:
    """Columns that only grow, and nodes that only split: the lower half of a split keeps the node's number, so
    calls and children that point to it stay right."""

    def __init__(self, capacity: int) -> None:
        self.size = 0
        self.duplicates = 0
        self.ids = np.empty(capacity, np.int32)
        self.sampled = np.zeros(capacity, np.bool_)
        self.columns: Columns = {name: np.full(capacity, fill, dtype) for name, (dtype, fill) in SAMPLED.items()}
        self.start, self.end, self.parent, self.depth = [0], [0], [-1], [0]
        self.children: list[dict[int, int]] = [{}]
        self.call_node: list[int] = []

    def add(self, record: CallRecord) -> None:
        """Insert one call: match its new tokens from where it leaves its parent, append what is left."""
        tokens = np.concatenate([record.prompt_ids, record.output_ids])
        node, used = self._locate(record)
        at = 0
        while True:
            here = self.start[node] + used
            matched = _common(self.ids[here : self.end[node]], tokens[at:])
            self._sample(record, here, at, matched)
            at += matched
            used += matched
            if at == len(tokens) or here + matched < self.end[node]:
                break
            child = self.children[node].get(int(tokens[at]))
            if child is None:
                break
            node, used = child, 0
        node = self._split(node, used)
        if at < len(tokens):
            node = self._append(record, node, tokens, at)
        self.call_node.append(node)

    def build(self, episode: str) -> EpisodeTree:
        return EpisodeTree(
            episode=episode,
            ids=self.ids[: self.size],
            sampled=self.sampled[: self.size],
            **{name: column[: self.size] for name, column in self.columns.items()},
            start=np.asarray(self.start, np.int32),
            end=np.asarray(self.end, np.int32),
            parent=np.asarray(self.parent, np.int32),
            depth=np.asarray(self.depth, np.int32),
            call_node=np.asarray(self.call_node, np.int32),
            duplicates=self.duplicates,
        )

    def _locate(self, record: CallRecord) -> tuple[int, int]:
        """The node in which the kept prefix ends, and how many of its tokens are kept (at least 1 off the root)."""
        if not record.kept:
            return ROOT, 0
        node = self.call_node[record.parent]
        length = self.depth[node] + self.end[node] - self.start[node]
        if record.kept > length:
            raise RecordError(
                f"episode {record.episode}: call {record.seq} keeps {record.kept} tokens of call {record.parent}, "
                f"which has {length}"
            )
        while self.depth[node] >= record.kept:
            node = self.parent[node]
        return node, record.kept - self.depth[node]

    def _sample(self, record: CallRecord, entry: int, at: int, count: int) -> None:
        """The call's new tokens [at, at + count) are column entries [entry, entry + count): those that it sampled, and
        no earlier call did, are its own."""
        prompt = len(record.prompt_ids)
        skip = max(prompt - at, 0)
        if skip >= count:
            return
        fresh = np.flatnonzero(~self.sampled[entry + skip : entry + count])
        self.duplicates += count - skip - len(fresh)
        entries, offsets = entry + skip + fresh, at + skip - prompt + fresh
        self.sampled[entries] = True
        self.columns["behaviour"][entries] = record.logprobs[offsets]
        self.columns["temperature"][entries] = record.temperature
        self.columns["version"][entries] = record.versions[offsets]
        self.columns["call"][entries] = record.seq
        self.columns["offset"][entries] = offsets

    def _append(self, record: CallRecord, node: int, tokens: Int32, at: int) -> int:
        """A new child of ``node`` with tokens[at:]; returns its number."""
        first = self.size
        self.size += len(tokens) - at
        self.ids[first : self.size] = tokens[at:]
        self._sample(record, first, at, len(tokens) - at)
        depth = self.depth[node] + self.end[node] - self.start[node]
        child = self._new_node(first, self.size, node, depth)
        self.children[node][int(tokens[at])] = child
        return child

    def _split(self, node: int, used: int) -> int:
        """Cut a node after ``used`` tokens; returns the node that ends there."""
        if self.start[node] + used == self.end[node]:
            return node
        cut = self.start[node] + used
        upper = self._new_node(self.start[node], cut, self.parent[node], self.depth[node])
        self.children[self.parent[node]][int(self.ids[self.start[node]])] = upper
        self.children[upper][int(self.ids[cut])] = node
        self.start[node], self.parent[node] = cut, upper
        self.depth[node] += used
        return upper

    def _new_node(self, start: int, end: int, parent: int, depth: int) -> int:
        self.start.append(start)
        self.end.append(end)
        self.parent.append(parent)
        self.depth.append(depth)
        self.children.append({})
        return len(self.start) - 1
