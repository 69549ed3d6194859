"""Training through every real component: Temporal, Valkey, SGLang, Megatron, Mooncake, sandboxes and a harness."""

from __future__ import annotations

import json
from typing import Any

import pytest
from local_stack import LocalStack

from infra.harness.harness import Harness
from infra.state.blobs import BlobStore
from trajectory.config import TrajectoryConfig
from workers.records.episodes import load_episode, sealed_episodes
from workflows.contracts.configuration import SchedulerConfig

pytestmark = pytest.mark.stack

GRADED = {"completed", "timed_out", "truncated"}


def assert_sound(results: list[dict[str, Any]], stack: LocalStack) -> None:
    """What must hold of every training step, whatever happened on the way."""
    for result in (result for result in results if result["train"]):
        assert set(result["outcomes"]) <= GRADED, result["outcomes"]
        assert result["valid"] == result["episodes"]
        assert result["staleness"] <= 1
        if result["micro_steps"]:
            replay = stack.json("replay", result["run"], str(result["step"]))
            assert replay["difference"] < 1e-5, replay
            assert replay["targets"] == result["trained_tokens"]


async def test_a_run_trains_and_cells_switch_role_inside_each_step(stack: LocalStack) -> None:
    stack.submit(stack.config("elastic", steps=2))
    results = await stack.finished("elastic")
    assert [result["version"] for result in results] == [1, 2]
    assert_sound(results, stack)
    for result in results:
        assert result["episodes_running_at_first_switch"] > 0, "a cell leaves rollout while episodes run"
    first = results[0]["train_stats"]
    assert first["max_token_delta"] < 1e-4
    assert first["max_sequence_log_ratio"] < 1e-5


async def test_the_gradient_of_two_cells_is_that_of_one(stack: LocalStack) -> None:
    small = {"trajectory": TrajectoryConfig(token_budget=256), "group_size": 8, "steps": 3}
    stack.submit(stack.config("two-cells", scheduler=SchedulerConfig(policy="colocate", claim_s=0.1), **small))
    results = await stack.finished("two-cells")
    assert_sound(results, stack)
    assert any(result["satellites"] for result in results), "no satellite gave a sum"


async def test_a_static_split_trains_on_cells_that_never_serve(stack: LocalStack) -> None:
    stack.submit(stack.config("split", steps=2, scheduler=SchedulerConfig(policy="async"), max_staleness=1))
    results = await stack.finished("split")
    assert_sound(results, stack)
    served = {
        cell
        for seal in stack.json("episodes", "split")
        for record in stack.json("show", seal["episode"])["records"][:1]
        for cell in record["cells"]
        if seal["step"] == 1
    }
    assert served == {"cell-1"}


async def test_steps_overlap_when_staleness_is_allowed(stack: LocalStack) -> None:
    finish = SchedulerConfig(satellite_s=5, calls_across_updates="finish")
    stack.submit(stack.config("overlap", steps=3, max_staleness=1, scheduler=finish))
    results = await stack.finished("overlap")
    assert [result["version"] for result in results] == [1, 2, 3]
    assert_sound(results, stack)
    blobs = BlobStore(stack.settings.blobs)
    for seal in sealed_episodes(blobs, "overlap", None):
        for record in load_episode(blobs, seal["episode"])[1]:
            assert len(set(record.versions.tolist())) == 1, "an update did not wait for the turn"


async def test_what_happened_can_be_read_afterwards(stack: LocalStack) -> None:
    run = "readable"
    stack.submit(stack.config(run, steps=1))
    await stack.finished(run)
    seals = stack.json("episodes", run)
    assert len(seals) == 16
    assert {seal["outcome"] for seal in seals} <= GRADED
    shown = stack.json("show", seals[0]["episode"])
    assert len(shown["records"]) == seals[0]["calls"] > 0
    assert shown["records"][-1]["kind"] == "main"
    assert "sampled" in stack.gyre("show", seals[0]["episode"])
    latest = json.loads(BlobStore(stack.settings.blobs).get_named(f"runs/{run}/LATEST"))
    assert latest["version"] == 1
    assert run in {found["run"] for found in stack.json("status")["runs"]}
    assert all(finding["ok"] for finding in stack.json("doctor"))


async def test_a_step_is_submitted_paused_and_resumed_by_hand(stack: LocalStack) -> None:
    run = "by-hand"
    stack.submit(stack.config(run, steps=3))
    stack.gyre("pause", run)
    stack.gyre("submit", "step", "--run", run, "--tasks", "8", "--request-id", "once")
    stack.gyre("submit", "step", "--run", run, "--tasks", "8", "--request-id", "once")
    view = stack.json("watch", run)
    assert view["paused"]
    stack.gyre("resume", run)
    results = await stack.finished(run)
    assert [result["episodes"] for result in results if not result["train"]] == [8]
    assert stack.gyre("submit", "step", "--run", "no-such-run", code=2) == ""


async def test_cells_leave_the_pool_and_come_back_while_a_run_goes_on(stack: LocalStack) -> None:
    run = "resized"
    stack.submit(stack.config(run, steps=3))
    await stack.until("the first step is open", lambda: bool(stack.json("watch", run)["open_steps"]), 60)
    stack.gyre("resize", "cell-0")
    assert list(stack.json("status")["cells"]) == ["cell-0"]
    stack.gyre("resize", "cell-0", "cell-1")
    results = await stack.finished(run)
    assert [result["version"] for result in results] == [1, 2, 3]
    assert_sound(results, stack)


async def test_a_cancelled_run_leaves_no_harness_and_frees_the_pool(stack: LocalStack) -> None:
    stack.submit(stack.config("cancelled", steps=50))
    await stack.until("the first step is open", lambda: bool(stack.json("watch", "cancelled")["open_steps"]), 60)
    stack.gyre("cancel", "cancelled")
    await stack.until("it has ended", lambda: stack.json("watch", "cancelled")["status"] == "CANCELED", 60)
    await stack.until("the pool is free", lambda: stack.json("status")["leased_to"] == "", 60)
    folders = (stack.settings.episodes / "cancelled").glob("*/*/*")
    await stack.until("no harness runs", lambda: all((f / "exit.json").exists() for f in folders), 60)


async def test_an_unmodified_harness_from_pypi_is_recorded_token_by_token(
    stack: LocalStack, mini_swe_agent: Harness
) -> None:
    run = "swe-agent"
    changes = {"harness": "mini-swe-agent", "tasks_per_step": 1, "group_size": 2, "steps": 1}
    stack.submit(stack.config(run, **changes, sampling={"max_new_tokens": 24, "context_limit": 8000, "max_calls": 3}))
    (result,) = await stack.finished(run)
    assert set(result["outcomes"]) <= GRADED, stack.gyre("episodes", run)
    seals = stack.json("episodes", run)
    records = stack.json("show", seals[0]["episode"])["records"]
    assert len(records) == 3
    assert all(len(record["output_ids"]) == len(record["logprobs"]) > 0 for record in records)
    assert [record["parent"] for record in records] == [-1, 0, 1], "each turn continues the one before"
