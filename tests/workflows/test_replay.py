"""Stored histories of a real run replay on today's workflow code: what is running goes on after an upgrade."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from workers.worker import WORKFLOWS

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.json.gz"))


def test_there_is_a_history_of_every_workflow_type() -> None:
    kinds = {"run", "step", "group", "scheduler", "cell"}
    labels: dict[str, set[str]] = {}
    for file in HISTORIES:
        kind, label = file.name.removesuffix(".json.gz").split(".")
        labels.setdefault(label, set()).add(kind)
    assert labels
    assert all(found >= kinds for found in labels.values())


@pytest.mark.parametrize("file", HISTORIES, ids=lambda file: file.name.removesuffix(".json.gz"))
async def test_a_stored_history_replays(file: Path) -> None:
    history = WorkflowHistory.from_json(file.stem, gzip.decompress(file.read_bytes()).decode())
    await Replayer(workflows=WORKFLOWS, data_converter=pydantic_data_converter).replay_workflow(history)
