"""A finished episode as one columnar file: its tree, and what each call says of itself.

Invariant: ``unseal(seal(tree, records))`` is the tree, column by column, and equal episodes have equal bytes. The file
is a safetensors file; nothing loops over tokens. What only sampled tokens have is kept for those alone.

    ids int32[n], sampled bool[n]                                 the n unique tokens
    logprob float32[k], version, call, offset int32[k]            its k sampled tokens, in the order of the columns
    temperature float32[c]                                        sampling temperature of each of the c calls
    node.start, .end, .parent, .depth int32[m]                    the m nodes
    call.NAME                                                     the c calls: numbers as they are, words as codes

This knows no rewards and no selection: those are made anew from the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trajectory.columns import SAMPLED, UNREADABLE, Columns, read_columns, write_columns
from trajectory.kinds import classify
from trajectory.records import CallRecord, RecordError
from trajectory.tree import EpisodeTree

_METADATA: Final = "gyre.episode"
_FORMAT: Final = 1
_WHOLE: Final = {
    "ids": "ids",
    "sampled": "sampled",
    "node.start": "start",
    "node.end": "end",
    "node.parent": "parent",
    "node.depth": "depth",
    "call.node": "call_node",
}
"""Columns of the file that are a whole column of the tree."""
_OF_SAMPLED: Final = {"logprob": "behaviour", "version": "version", "call": "call", "offset": "offset"}
"""Columns of the file that are a column of the tree where a token was sampled."""
NUMBERS: Final[dict[str, type[np.generic]]] = {
    **dict.fromkeys(("parent", "kept", "compacts", "partial", "malformed", "resampled", "synthetic"), np.int32),
    **dict.fromkeys(("side", "summary", "tools", "mutated"), np.bool_),
    **dict.fromkeys(("started_at", "active_s", "held_s"), np.float64),
}
_WORDS: Final = ("agent", "fork", "finish_reason")


class SealError(ValueError):
    """Bytes that are no sealed episode."""


@dataclass(frozen=True, eq=False)
class SealedEpisode:
    tree: EpisodeTree
    numbers: Columns
    """By name, one value per call: what ``NUMBERS`` names, as its record has it; ``prompt`` and ``output`` (int32:
    tokens that the call added); ``temperature`` (float32)."""
    words: dict[str, list[str]]
    """By name, one word per call: ``agent``, ``fork``, ``finish_reason``, ``cells`` (joined by a space), and ``kind``:
    that of the leaf that the call is, empty when it was continued."""


def seal(tree: EpisodeTree, records: Sequence[CallRecord]) -> bytes:
    """The file of one episode. Raises RecordError when ``tree`` has another number of calls than ``records``."""
    if len(tree.call_node) != len(records):
        raise RecordError(f"episode {tree.episode}: {len(records)} records, a tree of {len(tree.call_node)} calls")
    kinds = {leaf.seq: str(leaf.kind) for leaf in classify(records)}
    words = {name: [str(getattr(r, name)) for r in records] for name in _WORDS}
    words["cells"] = [" ".join(r.cells) for r in records]
    words["kind"] = [kinds.get(r.seq, "") for r in records]
    vocabulary = sorted({word for column in words.values() for word in column})
    code = {word: i for i, word in enumerate(vocabulary)}
    columns: Columns = {name: getattr(tree, column) for name, column in _WHOLE.items()}
    columns |= {name: getattr(tree, column)[tree.sampled] for name, column in _OF_SAMPLED.items()}
    columns["temperature"] = np.asarray([r.temperature for r in records], np.float32)
    columns["call.prompt"] = np.asarray([len(r.prompt_bytes) // 4 for r in records], np.int32)
    columns["call.output"] = np.asarray([len(r.output_bytes) // 4 for r in records], np.int32)
    columns |= {f"call.{name}": np.asarray([getattr(r, name) for r in records], t) for name, t in NUMBERS.items()}
    columns |= {f"call.{name}": np.asarray([code[w] for w in column], np.int32) for name, column in words.items()}
    facts = {"format": _FORMAT, "episode": tree.episode, "duplicates": tree.duplicates, "words": vocabulary}
    return write_columns(columns, _METADATA, facts)


def unseal(data: bytes) -> SealedEpisode:
    """The inverse of ``seal``. Raises SealError on anything else."""
    try:
        columns, facts = read_columns(data, _METADATA)
        if facts["format"] != _FORMAT:
            raise SealError(f"a sealed episode of format {facts['format']}; this gyre reads {_FORMAT}")
        vocabulary = facts["words"]
        words = {
            name: [vocabulary[code] for code in columns[f"call.{name}"].tolist()] for name in (*_WORDS, "cells", "kind")
        }
        numbers = {name: columns[f"call.{name}"] for name in (*NUMBERS, "prompt", "output")}
        return SealedEpisode(_tree(columns, facts), numbers | {"temperature": columns["temperature"]}, words)
    except (*UNREADABLE, IndexError) as error:
        raise SealError(f"not a sealed episode: {error}") from error


def _tree(columns: Columns, facts: dict[str, Any]) -> EpisodeTree:
    sampled = columns["sampled"]
    of_sampled = {column: columns[name] for name, column in _OF_SAMPLED.items()}
    of_sampled["temperature"] = columns["temperature"][columns["call"]]
    everywhere = {name: np.full(len(sampled), fill, dtype) for name, (dtype, fill) in SAMPLED.items()}
    for name, column in everywhere.items():
        column[sampled] = of_sampled[name]
    whole: dict[str, Any] = {column: columns[name] for name, column in _WHOLE.items()}
    return EpisodeTree(episode=facts["episode"], duplicates=facts["duplicates"], **whole, **everywhere)
