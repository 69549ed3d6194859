"""The checks of `gyre harness check` can fail: each finding, on records that are wrong in its own way."""

from __future__ import annotations

from typing import Any

import pytest

from trajectory.records import CallRecord, make_record
from workers.harness_check.engine import SeenRequest
from workers.harness_check.verify import verify


def record(seq: int, prompt: list[int], output: list[int], **more: Any) -> CallRecord:
    fields: dict[str, Any] = {
        "episode": "e",
        "seq": seq,
        "prev": "0" * 32,
        "agent": "root",
        "parent": seq - 1,
        "kept": 0,
        "temperature": 1.0,
        "finish_reason": "stop",
        "cells": ["c"],
        "started_at": 0.0,
        "active_s": 0.0,
        "held_s": 0.0,
    }
    values = {"logprobs": [-0.5] * len(output), "versions": [0] * len(output)}
    return make_record(prompt_ids=prompt, output_ids=output, **values, **(fields | more))


GOOD = [record(0, [1, 2], [3, 4]), record(1, [5], [6, 7], kept=4)]
SEEN = [SeenRequest([1, 2], [3, 4]), SeenRequest([1, 2, 3, 4, 5], [6, 7])]


def failed(records: list[CallRecord], requests: list[SeenRequest], **expected: set[int]) -> set[str]:
    return {finding.what for finding in verify(records, requests, expected or {"main": {1}}, 2) if not finding.ok}


def test_what_is_right_holds() -> None:
    assert failed(GOOD, SEEN) == set()


def test_a_call_that_was_held_when_its_harness_was_killed_needs_no_record() -> None:
    assert failed(GOOD, [*SEEN, SeenRequest([1, 2, 3], [9], held=True)]) == set()


@pytest.mark.parametrize(
    ("records", "requests", "what"),
    [
        (GOOD[:1], SEEN, {"turns", "the records are the engine's stream"}),
        (GOOD, SEEN[:1], {"the records are the engine's stream"}),
        (GOOD, [SEEN[0], SeenRequest([1, 2, 3, 4, 8], [6, 7])], {"the records are the engine's stream"}),
        ([GOOD[0], record(1, [5], [6, 7], kept=4, fork="unexplained")], SEEN, {"no fork without a reason"}),
        (
            [GOOD[0], record(1, [5], [3, 4], kept=4)],
            [SEEN[0], SeenRequest([1, 2, 3, 4, 5], [3, 4])],
            {"every call has a sample of its own"},
        ),
        ([GOOD[0], record(1, [5], [6, 7], kept=4, side=True)], SEEN, {"kinds"}),
        ([GOOD[0], record(1, [5], [6, 7], kept=9)], SEEN, {"every sampled token is a target once at most"}),
    ],
    ids=["lost record", "extra record", "other token", "fork", "one sample twice", "kind", "impossible prefix"],
)
def test_each_fault_is_found(records: list[CallRecord], requests: list[SeenRequest], what: set[str]) -> None:
    assert what <= failed(records, requests)
