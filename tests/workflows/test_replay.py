"""Stored histories of a real run replay on today's workflow code: what is running goes on after an upgrade."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from workers.worker import WORKFLOWS
from workflows.run import RunState

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


def agrees(written: Any, stored: Any) -> bool:
    """Everything that was stored is written as it was; what has come since may be beside it."""
    if isinstance(stored, dict):
        return all(agrees(written[name], value) for name, value in stored.items())
    return bool(written == stored)


@pytest.mark.parametrize("file", [file for file in HISTORIES if file.name.startswith("run.")])
def test_the_configuration_of_a_stored_run_is_read_and_written_as_what_it_was(file: Path) -> None:
    history = WorkflowHistory.from_json(file.stem, gzip.decompress(file.read_bytes()).decode())
    started = history.events[0].workflow_execution_started_event_attributes.input.payloads[0].data
    stored = json.loads(started)["config"]
    written = json.loads(RunState.model_validate_json(started).config.model_dump_json())
    for name, clip in (("epsilon_low", 3e-4), ("epsilon_high", 4e-4)):
        if stored["loss"].get(name, clip) is None:  # left to the loss: what that means is written out now
            stored["loss"][name] = clip
    assert agrees(written, stored)
