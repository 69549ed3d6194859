"""The radix tree holds every token once, and says who sampled it."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from trajectory_reference import Script, samplers, scripts, sequences

from trajectory.columns import Index
from trajectory.kinds import classify
from trajectory.records import CallRecord, RecordError, decode_chain, encode, make_record
from trajectory.selection import select
from trajectory.tree import ROOT, EpisodeTree


def _path(tree: EpisodeTree, call: int) -> Index:
    """Column entries of the call's whole sequence."""
    nodes = tree.nodes(int(tree.call_node[call]))
    return np.concatenate([np.arange(tree.start[n], tree.end[n]) for n in nodes])


@settings(max_examples=300, deadline=None)
@given(scripts(16))
def test_every_call_can_be_read_back_and_every_token_is_held_once(script: Script) -> None:
    records = script.records
    tree = EpisodeTree.from_records(records)
    first, duplicates = samplers(records)
    prefixes = set()
    for record, tokens in zip(records, sequences(records), strict=True):
        path = _path(tree, record.seq)
        assert tree.ids[path].tolist() == tokens
        assert (np.diff(path) > 0).all()
        for i, entry in enumerate(path):
            prefix = tuple(tokens[: i + 1])
            prefixes.add(prefix)
            assert bool(tree.sampled[entry]) == (prefix in first)
            if prefix not in first:
                assert (tree.call[entry], tree.offset[entry], tree.version[entry]) == (-1, -1, -1)
                assert (tree.behaviour[entry], tree.temperature[entry]) == (0, 1)
                continue
            call, offset = first[prefix]
            assert (tree.call[entry], tree.offset[entry]) == (call, offset)
            assert tree.behaviour[entry] == records[call].logprobs[offset]
            assert tree.version[entry] == records[call].versions[offset]
            assert tree.temperature[entry] == np.float32(records[call].temperature)
    assert len(tree.ids) == len(prefixes)
    assert tree.duplicates == duplicates
    assert sum(tree.sampled_per_node()) == len(first)


@settings(max_examples=200, deadline=None)
@given(scripts(16))
def test_nodes_partition_the_columns_and_siblings_differ_in_their_first_token(script: Script) -> None:
    tree = EpisodeTree.from_records(script.records)
    spans = sorted(zip(tree.start.tolist(), tree.end.tolist(), strict=True))
    assert spans[0] == (0, 0)
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
    assert spans[-1][1] == len(tree.ids)
    edges = [(tree.parent[n], tree.ids[tree.start[n]]) for n in range(1, len(tree.start))]
    assert len(set(edges)) == len(edges)
    for node in range(1, len(tree.start)):
        parent = tree.parent[node]
        assert tree.depth[node] == tree.depth[parent] + tree.end[parent] - tree.start[parent]


def test_an_empty_episode_has_a_root_and_no_tokens() -> None:
    tree = EpisodeTree.from_records([])
    assert len(tree.ids) == 0
    assert tree.nodes(ROOT) == []


def test_branches_inside_the_last_user_message_share_what_comes_before() -> None:
    script = Script()
    script.call([1, 2, 3], [10, 11])
    script.call([4, 5, 6], [12], parent=0)
    script.call([6, 7], [13], parent=1, kept=7)  # the turn was dropped, text appended to the user message
    tree = EpisodeTree.from_records(script.records)
    assert tree.ids[_path(tree, 2)].tolist() == [1, 2, 3, 10, 11, 4, 5, 6, 7, 13]
    assert len(tree.ids) == 11


def test_identical_parallel_samples_are_duplicates_of_the_first_sampler() -> None:
    script = Script()
    script.call([1, 2], [10, 11, 12])
    script.call([1, 2], [10, 11, 13])
    tree = EpisodeTree.from_records(script.records)
    assert tree.duplicates == 2
    assert tree.call[_path(tree, 1)].tolist() == [-1, -1, 0, 0, 1]


def test_a_turn_that_reappears_under_another_prefix_is_context_there() -> None:
    script = Script()
    script.call([1, 2], [10, 11])
    script.call([1, 9, 10, 11, 3], [12])  # kept tail after a compaction
    tree = EpisodeTree.from_records(script.records)
    assert tree.sampled[_path(tree, 1)].tolist() == [False] * 5 + [True]
    assert tree.duplicates == 0


def test_context_that_is_sampled_later_at_the_same_place_belongs_to_its_sampler() -> None:
    script = Script()
    script.call([1, 2, 3], [4])
    script.call([1], [2, 3, 5])
    tree = EpisodeTree.from_records(script.records)
    assert tree.call[_path(tree, 0)].tolist() == [-1, 1, 1, 0]
    assert tree.duplicates == 0


def _changed(record: CallRecord, **fields: object) -> CallRecord:
    return msgspec.structs.replace(record, **fields)


def _two_calls() -> list[CallRecord]:
    script = Script()
    script.call([1, 2], [3])
    script.call([4], [5], parent=0)
    return script.records


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kept": 4}, "keeps 4 tokens of call 0, which has 3"),
        ({"kept": -1}, "keeps -1"),
        ({"parent": -1}, "keeps 3 tokens of call -1"),
        ({"parent": 1}, "not an earlier call"),
        ({"parent": -2, "kept": 0}, "not an earlier call"),
        ({"seq": 2}, "missing or out of order"),
        ({"episode": "other"}, "among the records of episode e0"),
        ({"logprob_bytes": b""}, "different lengths"),
        ({"output_bytes": b"a", "logprob_bytes": b"a", "version_bytes": b"a"}, "whole 32-bit"),
        ({"logprob_bytes": np.array([np.nan], "<f4").tobytes()}, "not finite"),
        ({"kept": 0, "prompt_bytes": b""}, "without any prompt"),
    ],
)
def test_a_record_that_is_not_what_it_claims_is_refused(fields: dict[str, object], message: str) -> None:
    first, second = _two_calls()
    with pytest.raises(RecordError, match=message):
        EpisodeTree.from_records([first, _changed(second, **fields)])


def test_a_lost_or_exchanged_record_breaks_the_chain() -> None:
    script = Script()
    for i in range(3):
        script.call([1], [2], parent=i - 1)
    encoded = [encode(r) for r in script.records]
    assert [r.seq for r in decode_chain(encoded)] == [0, 1, 2]
    with pytest.raises(RecordError, match="record 1 is missing"):
        decode_chain([encoded[0], encoded[2]])
    forged = encode(_changed(script.records[0], temperature=0.5))
    with pytest.raises(RecordError, match="record 1 is missing or out of order"):
        decode_chain([forged, *encoded[1:]])
    with pytest.raises(RecordError, match="not a call record"):
        decode_chain([encoded[0][:-1]])


def test_an_episode_of_a_million_tokens_is_built_in_a_fraction_of_a_second() -> None:
    rng = np.random.default_rng(0)
    common = {
        "episode": "long",
        "prev": "",
        "agent": "root",
        "temperature": 1.0,
        "finish_reason": "stop",
        "cells": ["c"],
        "started_at": 0.0,
        "active_s": 0.0,
        "held_s": 0.0,
    }
    records = []
    length = 0
    for seq in range(300):
        prompt, output = rng.integers(0, 150_000, 2300, np.int32), rng.integers(0, 150_000, 1034, np.int32)
        records.append(
            make_record(
                seq=seq,
                parent=seq - 1,
                kept=length,
                prompt_ids=prompt,
                output_ids=output,
                logprobs=np.full(1034, -0.5, np.float32),
                versions=np.zeros(1034, np.int32),
                **common,
            )
        )
        length += 3334
    begin = time.process_time()
    tree = EpisodeTree.from_records(records)
    built = time.process_time()
    selection = select(tree, classify(records), 5)
    print(f"\n{len(tree.ids)} tokens: tree {built - begin:.3f} s, selection {time.process_time() - built:.3f} s of CPU")
    assert len(tree.ids) == length
    assert [t.targets for t in selection.trajectories] == [300 * 1034]
