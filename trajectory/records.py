"""Call records: what the proxy writes for each model request, and all that a trajectory is made of.

A record is a *delta*: it names the call that it continues (``parent``), how many of that call's tokens it
keeps, the prompt tokens that were added, and the tokens that the policy sampled. The full token sequence of a
call is therefore

    tokens(call) = tokens(parent)[:kept] + prompt_ids + output_ids

Records of one episode form a chain: each carries its number and the hash of the record before it, so that a
lost record is noticed instead of silently shortening an episode.

This module knows the record and its bytes. It does not know where they are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from trajectory.columns import Float32, Int32

FIRST_HASH: Final = "0" * 32
MOVED: Final = ("moved_tokens", "moved_from_store", "moved_recomputed", "moved_bytes")
"""Fields of a record that count what a moved call took along; they are summed under the same names."""


class RecordError(ValueError):
    """A record, or a chain of them, is not what it claims to be."""


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One delivered model call of one episode.

    Array fields are little-endian bytes so that a record of a million tokens costs no Python objects; use the
    ``prompt_ids``, ``output_ids``, ``logprobs`` and ``versions`` properties to read them.
    """

    episode: str
    seq: int
    """Number of this call in its episode, from 0, without gaps."""
    prev: str
    """Hash of record ``seq - 1`` (``FIRST_HASH`` for the first)."""
    agent: str
    """Lineage of the call: ``root`` for the harness's main agent, anything else for a sub-agent."""
    parent: int
    """``seq`` of the call that this one continues, -1 for none."""
    kept: int
    """How many leading tokens of the parent's full sequence this call keeps (0 when parent is -1)."""
    prompt_bytes: bytes
    """int32[p]: prompt token ids after the kept prefix. Never sampled in this call: mask 0."""
    output_bytes: bytes
    """int32[o]: sampled token ids, the end-of-turn token included when the policy sampled it."""
    logprob_bytes: bytes
    """float32[o]: behaviour log-probability of each sampled token at ``temperature``."""
    version_bytes: bytes
    """int32[o]: weight version that sampled each token."""
    temperature: float
    finish_reason: str
    """``stop``, ``length`` (token limit of the turn) or ``context`` (context limit)."""
    cells: list[str]
    """Cells that served the call, in order; more than one when it moved."""
    started_at: float
    """Unix time in seconds at which the request arrived."""
    active_s: float
    """Seconds spent sampling."""
    held_s: float
    """Seconds spent waiting for a cell, a role switch or a recomputed prefix. Not charged to the episode."""
    side: bool = False
    """A title, a search and the like: recorded, never trained."""
    summary: bool = False
    """The call asks for the summary of a context compaction, as far as could be told when it was made. A later call's
    ``compacts`` tells for certain."""
    compacts: int = -1
    """``seq`` of the call whose output is the summary with which this call's context window opens; -1 for none."""
    tools: bool = True
    """The request offered tools."""
    fork: str = ""
    """Why the call doesn't go on from its agent's latest call with all that was said: "" when it does; else
    ``agent`` (its first), ``compaction``, ``summary``, ``side``, ``dropped`` (the harness dropped a turn), ``resume``
    (a turn came back in part, or followed by one that the policy never said), ``opening`` (the system text or the tools
    have changed), ``sample`` (the same request once more) or ``unexplained``."""
    partial: int = 0
    """Earlier turns that came back in part; what came back keeps its sampled tokens."""
    malformed: int = 0
    """Spans of the turn that were opened as tool calls and are none."""
    resampled: int = 0
    """Tokens that had been sampled but were lost undelivered (a cell died), and were sampled again."""
    moved_tokens: int = 0
    """Prefix tokens whose KV lay on another engine than the one that was asked: each time the call moved, and when it
    began on another cell than its parent. Absent from older records, like the three that follow."""
    moved_from_store: int = 0
    """Of these, those whose KV came from the KV store."""
    moved_recomputed: int = 0
    """Of these, those whose KV was computed again; the engine had the rest."""
    moved_bytes: int = 0
    """Of KV that came from the store; 0 where the proxy doesn't know its model's shapes."""
    mutated: bool = False
    """The harness sent back an earlier turn with its text rewritten."""
    synthetic: int = 0
    """Assistant turns in the prompt that the policy never said."""

    @property
    def prompt_ids(self) -> Int32:
        return np.frombuffer(self.prompt_bytes, dtype="<i4")

    @property
    def output_ids(self) -> Int32:
        return np.frombuffer(self.output_bytes, dtype="<i4")

    @property
    def logprobs(self) -> Float32:
        return np.frombuffer(self.logprob_bytes, dtype="<f4")

    @property
    def versions(self) -> Int32:
        return np.frombuffer(self.version_bytes, dtype="<i4")


def make_record(
    *,
    prompt_ids: Sequence[int] | Int32,
    output_ids: Sequence[int] | Int32,
    logprobs: Sequence[float] | Float32,
    versions: Sequence[int] | Int32,
    **fields: Any,
) -> CallRecord:
    """A record from plain sequences. Raises RecordError when the per-token columns differ in length."""
    if not len(output_ids) == len(logprobs) == len(versions):
        raise RecordError(
            f"call {fields.get('episode')}#{fields.get('seq')}: {len(output_ids)} sampled tokens, "
            f"{len(logprobs)} log-probs, {len(versions)} versions; the three must be equal"
        )
    return CallRecord(
        prompt_bytes=np.asarray(prompt_ids, dtype="<i4").tobytes(),
        output_bytes=np.asarray(output_ids, dtype="<i4").tobytes(),
        logprob_bytes=np.asarray(logprobs, dtype="<f4").tobytes(),
        version_bytes=np.asarray(versions, dtype="<i4").tobytes(),
        **fields,
    )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CallRecord)


def encode(record: CallRecord) -> bytes:
    """The record's bytes (MessagePack). Equal records have equal bytes."""
    return _encoder.encode(record)


def decode(data: bytes) -> CallRecord:
    """The inverse of ``encode``. Raises RecordError on anything else."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise RecordError(f"not a call record: {error}") from error


def record_hash(data: bytes) -> str:
    """The chain hash of an encoded record (xxh3-128, hex)."""
    return xxhash.xxh3_128_hexdigest(data)


def decode_chain(encoded: Iterable[bytes]) -> list[CallRecord]:
    """Decode an episode's records in order and check the chain.

    Raises RecordError on a gap, a reordering or a record that another one should have preceded.
    """
    records: list[CallRecord] = []
    expected = FIRST_HASH
    for data in encoded:
        record = decode(data)
        if record.seq != len(records) or record.prev != expected:
            raise RecordError(
                f"episode {record.episode}: record {len(records)} is missing or out of order (found {record.seq})"
            )
        if record.parent >= record.seq:
            raise RecordError(f"episode {record.episode}: call {record.seq} continues later call {record.parent}")
        records.append(record)
        expected = record_hash(data)
    return records
