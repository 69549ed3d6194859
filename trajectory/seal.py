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

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trajectory.kinds import classify
from trajectory.records import CallRecord, Int32, RecordError
from trajectory.tree import UNSAMPLED, EpisodeTree

_METADATA: Final = "gyre.episode"
_FORMAT: Final = 1
_WORDS: Final = ("agent", "fork", "finish_reason")
_NUMBERS: Final = ("parent", "kept", "compacts", "partial", "malformed", "resampled", "synthetic")
_FLAGS: Final = ("side", "summary", "tools", "mutated")
_SECONDS: Final = ("started_at", "active_s", "held_s")


class SealError(ValueError):
    """Bytes that are no sealed episode."""


@dataclass(frozen=True, eq=False)
class SealedEpisode:
    tree: EpisodeTree
    numbers: dict[str, npt.NDArray[Any]]
    """By name, one value per call: ``parent``, ``kept``, ``prompt`` and ``output`` (tokens that the call added),
    ``compacts``, ``partial``, ``malformed``, ``resampled``, ``synthetic`` (int32), ``side``, ``summary``, ``tools``,
    ``mutated`` (bool), ``started_at``, ``active_s``, ``held_s`` (float64, seconds), ``temperature`` (float32)."""
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
    columns: dict[str, npt.NDArray[Any]] = {
        "ids": tree.ids,
        "sampled": tree.sampled,
        "logprob": tree.behaviour[tree.sampled],
        "version": tree.version[tree.sampled],
        "call": tree.call[tree.sampled],
        "offset": tree.offset[tree.sampled],
        "temperature": np.asarray([r.temperature for r in records], np.float32),
        "node.start": tree.start,
        "node.end": tree.end,
        "node.parent": tree.parent,
        "node.depth": tree.depth,
        "call.node": tree.call_node,
        "call.prompt": np.asarray([len(r.prompt_bytes) // 4 for r in records], np.int32),
        "call.output": np.asarray([len(r.output_bytes) // 4 for r in records], np.int32),
    }
    for names, dtype in ((_NUMBERS, np.int32), (_FLAGS, np.bool_), (_SECONDS, np.float64)):
        columns |= {f"call.{name}": np.asarray([getattr(r, name) for r in records], dtype) for name in names}
    columns |= {f"call.{name}": np.asarray([code[w] for w in column], np.int32) for name, column in words.items()}
    about = {"format": _FORMAT, "episode": tree.episode, "duplicates": tree.duplicates, "words": vocabulary}
    # one metadata entry: safetensors writes several in the order of a randomised hash map
    metadata = {_METADATA: json.dumps(about, sort_keys=True)}
    data: bytes = save({name: np.ascontiguousarray(column) for name, column in columns.items()}, metadata=metadata)
    return data


def unseal(data: bytes) -> SealedEpisode:
    """The inverse of ``seal``. Raises SealError on anything else."""
    try:
        columns = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header["__metadata__"][_METADATA])
        if about["format"] != _FORMAT:
            raise SealError(f"a sealed episode of format {about['format']}; this gyre reads {_FORMAT}")
        vocabulary = about["words"]
        words = {
            name: [vocabulary[code] for code in columns[f"call.{name}"].tolist()] for name in (*_WORDS, "cells", "kind")
        }
        numbers = {name: columns[f"call.{name}"] for name in (*_NUMBERS, *_FLAGS, *_SECONDS, "prompt", "output")}
        return SealedEpisode(_tree(columns, about), numbers | {"temperature": columns["temperature"]}, words)
    except (SafetensorError, KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise SealError(f"not a sealed episode: {error}") from error


def _tree(columns: dict[str, npt.NDArray[Any]], about: dict[str, Any]) -> EpisodeTree:
    sampled = columns["sampled"]
    call: Int32 = columns["call"]
    tokens = len(sampled)

    def spread(name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        dtype, fill = UNSAMPLED[name]
        column = np.full(tokens, fill, dtype)
        column[sampled] = values
        return column

    return EpisodeTree(
        episode=about["episode"],
        ids=columns["ids"],
        sampled=sampled,
        behaviour=spread("behaviour", columns["logprob"]),
        version=spread("version", columns["version"]),
        temperature=spread("temperature", columns["temperature"][call]),
        call=spread("call", call),
        offset=spread("offset", columns["offset"]),
        start=columns["node.start"],
        end=columns["node.end"],
        parent=columns["node.parent"],
        depth=columns["node.depth"],
        call_node=columns["call.node"],
        duplicates=about["duplicates"],
    )
