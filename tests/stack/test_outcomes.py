"""How episodes end, for real: a spent budget is graded on what was left, a broken evaluator is never a zero."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_stack import LocalStack

from workflows.configuration import BudgetConfig, TaskSets

pytestmark = pytest.mark.stack

TASK_TOML = """schema_version = "1.3"
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 20.0
[environment]
network_mode = "no-network"
"""


def write_task(folder: Path, *, instruction: str, files: dict[str, str], test: str) -> None:
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text(TASK_TOML)
    (folder / "instruction.md").write_text(instruction + "\n")
    for name, text in files.items():
        (folder / "environment" / name).write_text(text)
    (folder / "tests" / "test.sh").write_text("#!/bin/sh\n" + test + "\n")


async def test_a_spent_budget_is_graded_and_a_broken_evaluator_is_excluded(stack: LocalStack) -> None:
    tasks = stack.settings.root / "outcomes"
    write_task(
        tasks / "0-slow",
        instruction="Run `oak.sh` until it prints `done`.",
        files={"oak.sh": "echo half > half.txt\nsleep 9\necho working\n"},
        test="if test -f /workspace/half.txt; then echo 0.5; else echo 0; fi > /logs/verifier/reward.txt",
    )
    write_task(
        tasks / "1-broken",
        instruction="Create `fox.txt` with text `red`.",
        files={},
        test="echo the verifier is broken >&2; exit 1",
    )
    run = "outcomes"
    changes = {"tasks": TaskSets(train=str(tasks)), "tasks_per_step": 2, "group_size": 4, "steps": 1}
    stack.submit(stack.config(run, **changes, budget=BudgetConfig(active_s=4, wall_s=120)))
    (result,) = await stack.finished(run)

    seals = stack.json("episodes", run)
    slow = [seal for seal in seals if seal["task"].endswith("#0")]
    assert "timed_out" in {seal["outcome"] for seal in slow}, slow
    for seal in slow:
        if seal["outcome"] == "timed_out":
            assert seal["reward"] == 0.5, "partial credit on the preserved workspace"
            assert 4 <= seal["exit"]["active_s"] < 15
    broken = [seal for seal in seals if seal["task"].endswith("#1")]
    assert {seal["outcome"] for seal in broken} == {"evaluator_failed"}
    assert {seal["reward"] for seal in broken} == {None}
    assert all("the verifier is broken" in seal["detail"] for seal in broken)
    assert result["valid"] == 4
    assert result["groups_without_gradient"].get("too_few") == 1
