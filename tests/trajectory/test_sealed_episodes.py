"""A sealed episode is one file from which the whole tree comes back, column by column."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from safetensors.numpy import load
from trajectory_reference import Script, kinds, scripts

from trajectory.kinds import classify
from trajectory.records import RecordError
from trajectory.seal import SealError, seal, unseal
from trajectory.selection import select
from trajectory.tree import EpisodeTree


@settings(max_examples=200, deadline=None)
@given(scripts(12, told=True))
def test_the_tree_and_the_table_of_calls_come_back(script: Script) -> None:
    records = script.records
    tree = EpisodeTree.from_records(records)
    data = seal(tree, records)
    assert data == seal(EpisodeTree.from_records(records), records)
    back = unseal(data)
    for field in dataclasses.fields(EpisodeTree):
        one, other = getattr(tree, field.name), getattr(back.tree, field.name)
        assert np.array_equal(one, other), field.name
        assert not isinstance(one, np.ndarray) or one.dtype == other.dtype
    assert back.words["agent"] == [r.agent for r in records]
    assert back.words["fork"] == [r.fork for r in records]
    assert back.words["kind"] == [kinds(records).get(r.seq, "") for r in records]
    assert back.numbers["parent"].tolist() == [r.parent for r in records]
    assert back.numbers["kept"].tolist() == [r.kept for r in records]
    assert back.numbers["output"].tolist() == [len(r.output_ids) for r in records]
    assert back.numbers["summary"].tolist() == [r.summary for r in records]
    assert back.numbers["active_s"].tolist() == [r.active_s for r in records]
    again = select(back.tree, classify(records), 5)
    assert [t.targets for t in again.trajectories] == [
        t.targets for t in select(tree, classify(records), 5).trajectories
    ]


def test_a_million_tokens_load_without_a_loop_over_them() -> None:
    script = Script()
    script.call(np.arange(600_000).tolist(), np.arange(400_000).tolist(), logprobs=[-0.5] * 400_000)
    data = seal(EpisodeTree.from_records(script.records), script.records)
    begin = time.process_time()
    back = unseal(data)
    seconds = time.process_time() - begin
    print(f"\n{len(back.tree.ids)} tokens, {len(data) / len(back.tree.ids):.1f} bytes each, loaded in {seconds:.3f} s")
    assert seconds < 0.5
    assert load(data)["sampled"].sum() == 400_000


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x00" * 64])
def test_bytes_that_are_no_sealed_episode_are_refused(data: bytes) -> None:
    with pytest.raises(SealError):
        unseal(data)


def test_a_tree_of_other_records_is_refused() -> None:
    script = Script()
    script.call([1], [2])
    tree = EpisodeTree.from_records(script.records)
    script.call([1], [3])
    with pytest.raises(RecordError, match="2 records, a tree of 1 calls"):
        seal(tree, script.records)
