"""How episodes end, for real: a spent budget is graded on what was left, a broken evaluator is never a zero."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_stack import LocalStack

from infra.quickstart.tasks import WORDS
from workflows.contracts.configuration import BudgetConfig, TaskSets

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


def write_slow_task(folder: Path, verdict: str) -> None:
    """The policy is a beginner: more than half of the time it runs a script, and often another one than it is told."""
    scripts = {f"{word}.sh": "echo half > half.txt\nsleep 9\necho working\n" for word in WORDS}
    test = f"({verdict}) > /logs/verifier/reward.txt"
    write_task(folder, instruction="Run `oak.sh` until it prints `done`.", files=scripts, test=test)


async def test_a_spent_budget_is_graded_and_a_broken_evaluator_is_excluded(stack: LocalStack) -> None:
    tasks = stack.settings.root / "outcomes"
    write_slow_task(tasks / "0-slow", "if test -f /workspace/half.txt; then echo 0.5; else echo 0; fi")
    write_task(
        tasks / "1-broken",
        instruction="Create `fox.txt` with text `red`.",
        files={},
        test="echo the verifier is broken >&2; exit 1",
    )
    run, size = "outcomes", 12
    changes = {"tasks": TaskSets(train=str(tasks)), "tasks_per_step": 2, "group_size": size, "steps": 1}
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
    assert result["valid"] == size
    assert result["groups_without_gradient"].get("too_few") == 1
    assert result["gauges"]["excluded"] == 0.5

    gauges = stack.json("gauges", run, str(result["step"]))
    assert gauges["excluded"] == {"evaluator_failed": size}
    assert sum(counts["excluded"] for counts in gauges["lengths"].values()) == size
    assert gauges["rewards"][f"{tasks}#0"]["episodes"] == size
    assert {kind: sum(gauges[kind].values()) for kind in ("sampled", "trained")} == {
        "sampled": result["sampled_tokens"],
        "trained": result["trained_tokens"],
    }
    if result["micro_steps"]:
        assert gauges["loss"]["targets"] == result["trained_tokens"]
        assert result["gauges"]["mismatch_p99"] < 1e-3

    (tasks / "1-broken" / "tests" / "test.sh").write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    verdicts = stack.json("regrade", run, "--outcome", "evaluator_failed")
    assert {verdict["reward"] for verdict in verdicts} == {1.0}
    for seal in stack.json("episodes", run):
        if seal["task"].endswith("#1"):
            (verdict,) = seal["verdicts"]
            assert (seal["reward"], verdict["reward"]) == (None, 1.0)
            assert seal["evaluator"].startswith("1-broken@") and seal["evaluator"] != verdict["evaluator"]
