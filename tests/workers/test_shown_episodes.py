"""`gyre show` says of a recorded episode what happened to its calls on their way."""

from __future__ import annotations

from trajectory.records import CallRecord, make_record
from workers.records.episodes import episode_counts, episode_json


def record(seq: int, **fields: object) -> CallRecord:
    return make_record(
        **{
            "episode": "e",
            "seq": seq,
            "prev": "",
            "agent": "root",
            "parent": seq - 1,
            "kept": 2 * seq,
            "prompt_ids": [1],
            "output_ids": [2],
            "logprobs": [-1.0],
            "versions": [0],
            "temperature": 1.0,
            "finish_reason": "stop",
            "cells": ["a"],
            "started_at": 0.0,
            "active_s": 0.0,
            "held_s": 0.0,
            **fields,
        }
    )


def test_forks_and_changed_turns_are_counted_and_zeros_left_out() -> None:
    told = [record(0), record(1, fork="resume", partial=1, synthetic=2), record(2, mutated=True, resampled=7)]
    counts = {"fork.resume": 1, "mutated": 1, "synthetic": 2, "partial": 1, "resampled": 7}
    assert episode_counts(told) == counts
    shown = episode_json({"episode": "e"}, told)
    assert shown["counts"] == counts
    assert [(call["agent"], call["fork"], call["compacts"], call["kind"]) for call in shown["records"]] == [
        ("root", "", -1, ""),
        ("root", "resume", -1, ""),
        ("root", "", -1, "main"),
    ]
