"""How long a cell waits for its calls, by why it leaves: another role, an update, a pause. Real workflows."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from scripted_cluster import ScriptedCluster
from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from test_orchestration import config, pool, replay, start

from trajectory.config import LossConfig, OptimizerConfig
from workflows import names
from workflows.cell import Cell
from workflows.contracts.configuration import EvaluationConfig, SchedulerConfig
from workflows.contracts.orders import CellStatus, Desired, DrainInput, DrainResult, RunContext
from workflows.contracts.results import PauseRequest
from workflows.run import Run

pytestmark = pytest.mark.stack

LONG_S = 500.0
CONTEXT = RunContext(run="none", policy="policy", optimizer=OptimizerConfig(), loss=LossConfig())


class DrainingCluster(ScriptedCluster):
    """Notes every drain; one of ``LONG_S`` goes on until it is cancelled."""

    @activity.defn(name="drain_cell")
    async def drain_cell(self, drain: DrainInput) -> DrainResult:
        self.log.append(("drain", (drain.cell, drain.drain_s)))
        if drain.drain_s != LONG_S:
            return DrainResult(seconds=0.25, acknowledged=1, expired=0, ended=2, moved=1)
        while True:
            activity.heartbeat()
            await asyncio.sleep(0.05)

    def of(self, cell: str) -> list[tuple[str, float | int | None]]:
        """What was done to a cell: drains with their seconds, served versions, trained steps."""
        return [
            (kind, entry[1]) for kind, entry in self.log if kind in ("drain", "serve", "train") and entry[0] == cell
        ]


@pytest.mark.parametrize(("across", "update_s"), [("finish", 99.0), ("continue", 0.0)])
async def test_a_run_says_how_long_its_cells_wait_for_calls(across: str, update_s: float) -> None:
    cluster = DrainingCluster(episode_s=lambda episode: 0.05 if episode.step < 2 else 2.0)
    scheduler = SchedulerConfig(
        policy="async", satellite_s=0, drain_s=1.5, calls_across_updates=across, update_wait_s=99.0
    )
    async with pool(cluster) as client:
        handle = await start(client, config(steps=3, evaluation=EvaluationConfig(every=0), scheduler=scheduler))
        async with asyncio.timeout(30):
            while ("serve", 2) not in cluster.of("cell-1"):
                await asyncio.sleep(0.05)
        await handle.execute_update(Run.pause, PauseRequest(request_id="p", hold=True))
        async with asyncio.timeout(20):
            while cluster.of("cell-1")[-1][0] != "drain":
                await asyncio.sleep(0.05)
        serving = cluster.of("cell-1")
        await handle.execute_update(Run.resume, PauseRequest(request_id="q"))
        await asyncio.wait_for(handle.result(), 60)
        moves = list(pairwise(serving))
        updates = [before[1] for before, after in moves if after in (("serve", 1), ("serve", 2))]
        assert updates == [update_s, update_s]
        assert serving[-1] == ("drain", 0.0), "a pause that holds waits for nothing"
        training = cluster.of("cell-0")
        leaving = {before for before, after in pairwise(training) if after[0] == "train"}
        assert leaving == {("drain", 1.5)}


async def desire(client: Client, cell: WorkflowHandle[Cell, None], holds: bool = True, **state: object) -> CellStatus:
    """Signal a desired state; returns the status when it holds, or when the cell waits for its calls."""
    desired = Desired.model_validate({"candidate_ref": "c", "context": CONTEXT, **state})
    await cell.signal(Cell.set_desired, desired)
    async with asyncio.timeout(20):
        while True:
            status = await cell.query(Cell.status)
            if status.epoch == desired.epoch and (status.version == desired.version if holds else status.draining_s):
                return status
            await asyncio.sleep(0.05)


async def test_a_newer_state_ends_the_wait_for_calls() -> None:
    cluster = DrainingCluster()
    async with pool(cluster, cells=1) as client:
        cell = client.get_workflow_handle_for(Cell.run, names.cell_id("cell-0"))
        status = await desire(client, cell, epoch=100, role="rollout", version=1, drain_s=3.0)
        assert status.last_drain == DrainResult(seconds=0.25, acknowledged=1, expired=0, ended=2, moved=1)
        assert status.draining_s is None
        waiting = await desire(client, cell, False, epoch=101, role="rollout", version=2, update_wait_s=LONG_S)
        assert (waiting.draining_s, waiting.version) == (LONG_S, 1)
        status = await desire(client, cell, epoch=102, role="train", step=2, version=2, drain_s=3.0)
        assert status.draining_s is None
        assert ("serve", 2) not in cluster.of("cell-0"), "the state that nobody wants any more was not entered"
        assert cluster.of("cell-0")[-2:] == [("drain", 3.0), ("train", 2)]
        await replay(client, names.cell_id("cell-0"))
