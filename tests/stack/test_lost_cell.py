"""A whole cell stops answering in the middle of a step, and comes back with all that it knew."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from local_stack import LocalStack

from infra.megatron.checkpoint import load_candidate
from infra.state.blobs import BlobStore
from infra.temporal import connect
from workflows import names
from workflows.cell import Cell
from workflows.contracts.configuration import SchedulerConfig

pytestmark = pytest.mark.stack

LOST_S = 8.0
PARTS = ("cell-0-worker", "cell-0-engine", "cell-0-replica")


def signal_parts(stack: LocalStack, number: signal.Signals) -> None:
    """To every process of the cell: a stopped one has not ended, so nobody starts it again."""
    for part in PARTS:
        os.killpg(stack.pid(part), number)


async def test_a_frozen_core_is_replaced_and_used_again_when_it_thaws(stack: LocalStack) -> None:
    run = "frozen"
    scheduler = SchedulerConfig(policy="watermark", lost_s=LOST_S, claim_s=0.5)
    stack.submit(stack.config(run, steps=2, group_size=12, scheduler=scheduler))
    client = await connect(stack.settings)
    step = client.get_workflow_handle(names.step_id(run, 0))
    cell = client.get_workflow_handle_for(Cell.run, names.cell_id("cell-0"))

    async def progress() -> dict[str, Any]:
        found: dict[str, Any] = await step.query("progress")
        return found

    def cells() -> dict[str, str]:
        found: dict[str, str] = stack.json("status")["cells"]
        return found

    await stack.until("the step is open", lambda: bool(stack.json("watch", run)["open_steps"]), 60)
    async with asyncio.timeout(120):
        while (await progress())["trainers"].get("cell-0", 0) < 1:
            await asyncio.sleep(0.1)
    before = await cell.query(Cell.status)
    assert before.replica
    signal_parts(stack, signal.SIGSTOP)
    try:
        await stack.until("the cell is lost", lambda: cells()["cell-0"] == "lost", 120)
        lost = await cell.query(Cell.status)
        assert lost.lost
        await stack.until("another is core, or the step is over", lambda: over_or_core(stack, run), 180)
    finally:
        signal_parts(stack, signal.SIGCONT)
    await stack.until("the cell is used", lambda: cells()["cell-0"] in ("rollout", "train", "core"), 180)
    results = await stack.finished(run, 400)

    assert [result["version"] for result in results] == [1, 2]
    assert results[0]["core"] == "cell-1"
    claims = load_candidate(BlobStore(stack.settings.blobs), results[0]["candidate_ref"]).claims
    assert before.replica not in claims, "the sum of the core that was lost is in no gradient"
    for result in results:
        assert set(result["outcomes"]) == {"completed"}, stack.gyre("episodes", run)
        replay = stack.json("replay", run, str(result["step"]))
        assert replay["difference"] < 1e-5
        assert replay["targets"] == result["trained_tokens"], "every trained token is in exactly one durable record"
    assert "cell-0" in {results[1]["core"], *results[1]["satellites"]}, "it is used again"


def over_or_core(stack: LocalStack, run: str) -> bool:
    view = stack.json("watch", run)
    return bool(view["results"]) or stack.json("status")["cells"]["cell-1"] == "core"
