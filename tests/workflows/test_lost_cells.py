"""Cells that fall silent, come back, or are taken out of the pool, in the middle of a step. Real workflows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from scripted_cluster import ScriptedCluster
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.worker import Worker
from test_orchestration import config, pool, replay, start

from workflows import names
from workflows.contracts.configuration import EvaluationConfig, RunConfig, SchedulerConfig
from workflows.contracts.results import ResizeRequest
from workflows.scheduler import Scheduler, SchedulerState
from workflows.scheduling.policies import POLICIES, decide
from workflows.scheduling.pool_view import PoolView, StepView

pytestmark = pytest.mark.stack

COLOCATE = SchedulerConfig(policy="colocate", claim_s=0.1, lost_s=3, drain_s=0)
"""All cells train when the episodes have ended, a micro-step to a claim. A busy machine may take a second to hand a
live cell its order; only a cell that is silent on purpose may run into ``lost_s``."""


def run_config(steps: int = 1, tasks: int = 6, scheduler: SchedulerConfig = COLOCATE) -> RunConfig:
    return config(steps=steps, tasks_per_step=tasks, evaluation=EvaluationConfig(every=0), scheduler=scheduler)


async def until(what: str, holds: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.05)
    assert holds(), what


async def scheduler_until(client: Client, holds: Callable[[SchedulerState], bool], seconds: float = 30) -> None:
    handle = client.get_workflow_handle_for(Scheduler.run, names.scheduler_id("local"))
    async with asyncio.timeout(seconds):
        while not holds(await handle.query(Scheduler.status)):
            await asyncio.sleep(0.05)


def trained_again(cluster: ScriptedCluster) -> set[str]:
    counts = Counter(ref for refs in cluster.sums.values() for ref in refs)
    return {ref for ref, count in counts.items() if count > 1}


@pytest.mark.parametrize("cell", ["cell-0", "cell-1"])
async def test_a_trainer_is_lost_another_goes_on_and_only_its_work_is_done_again(cell: str) -> None:
    """cell-0 is the core, cell-1 a satellite. It comes back while the step goes on, and helps with a sum of its own."""
    cluster = ScriptedCluster(silent_after={cell: 2}, claim_s=0.4)
    async with pool(cluster, cells=3) as client:
        handle = await start(client, run_config(tasks=20))
        await scheduler_until(client, lambda state: cell in state.lost)
        before = list(cluster.sums[f"{cell}#0"])
        cluster.silent.discard(cell)
        outcome = await asyncio.wait_for(handle.result(), 60)
        assert outcome.version == 1
        (finish,) = cluster.finished
        assert len(before) == 2
        assert trained_again(cluster) - set(cluster.sums[f"{cell}#0"][2:]) == set(before), "only its sum is done again"
        sums = {finish.incarnation, *(offer.incarnation for offer in finish.satellites)}
        assert f"{cell}#0" not in sums, "what was declared lost is in no gradient"
        assert f"{cell}#1" in sums, "a cell that is back is used again"
        assert (finish.cell == "cell-0") is (cell != "cell-0"), "a live core stays, a lost one is replaced for good"
        assert finish.incarnation.endswith("#0"), "a satellite that becomes core keeps its sum"
        await replay(client, "gyre/r1/step/000000", names.cell_id(cell), names.scheduler_id("local"))


async def test_a_serving_cell_is_lost_and_serves_again_when_it_is_back() -> None:
    cluster = ScriptedCluster(episode_s=lambda episode: 1.0)
    async with pool(cluster) as client:
        handle = await start(client, run_config(steps=40, tasks=2))
        await until("both serve", lambda: {e[0] for k, e in cluster.log if k == "serve"} == {"cell-0", "cell-1"})
        cluster.silent.add("cell-1")
        await scheduler_until(client, lambda s: s.lost == {"cell-1": "its replica has not answered for 3 s"})
        before = len(cluster.committed)
        await until("the others go on", lambda: len(cluster.committed) > before)
        assert not any(offer.cell == "cell-1" for finish in cluster.finished[before:] for offer in finish.satellites)
        cluster.silent.discard("cell-1")
        served = len(cluster.log)
        again = ("serve", "train")
        await until("it is used", lambda: any(k in again and e[0] == "cell-1" for k, e in cluster.log[served:]))
        await handle.cancel()


async def test_a_cell_without_a_worker_is_left_out_until_one_comes() -> None:
    cluster = ScriptedCluster()
    async with pool(cluster, cells=1) as client:
        scheduler = client.get_workflow_handle_for(Scheduler.run, names.scheduler_id("local"))
        await scheduler.execute_update("resize", ResizeRequest(request_id="r", cells=["cell-0", "cell-7"]))
        handle = await start(client, run_config(steps=40, tasks=2))
        await scheduler_until(client, lambda state: "does not run" in state.lost.get("cell-7", ""))
        await client.start_workflow(
            "gyre.Cell",
            {"cell": "cell-7", "pool": "local"},
            id=names.cell_id("cell-7"),
            task_queue=names.CONTROL_QUEUE,
        )
        await scheduler_until(client, lambda state: state.lost.get("cell-7", "").startswith("its worker"))
        assert cluster.committed, "the others go on"
        queue = names.cell_queue("cell-7")
        async with Worker(client, task_queue=queue, activities=cluster.activities()):
            await until("it is used", lambda: any(k == "train" and e[0] == "cell-7" for k, e in cluster.log))
            await handle.cancel()


async def test_resize_takes_a_cell_away_that_trains_and_gives_it_back() -> None:
    cluster = ScriptedCluster(claim_s=0.3)
    async with pool(cluster) as client:
        scheduler = client.get_workflow_handle_for(Scheduler.run, names.scheduler_id("local"))
        handle = await start(client, run_config(steps=2, tasks=4))
        await until("the core has summed something", lambda: bool(cluster.sums.get("cell-0#0")))
        await scheduler.execute_update("resize", ResizeRequest(request_id="r", cells=["cell-1"]))
        await until("the step is over", lambda: bool(cluster.finished))
        (finish,) = cluster.finished
        assert (finish.cell, finish.satellites) == ("cell-1", [])
        assert trained_again(cluster) <= set(cluster.sums["cell-0#0"])
        await scheduler.execute_update("resize", ResizeRequest(request_id="s", cells=["cell-0", "cell-1"]))
        await asyncio.wait_for(handle.result(), 60)
        second = cluster.finished[1]
        assert {second.cell, *(offer.cell for offer in second.satellites)} == {"cell-0", "cell-1"}
        with pytest.raises(WorkflowUpdateFailedError):
            await scheduler.execute_update("resize", ResizeRequest(request_id="t", cells=[]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("unfinished", [0, 3])
def test_a_policy_without_a_cell_decides_nothing(policy: str, unfinished: int) -> None:
    view = PoolView(
        run="r",
        cells=[],
        steps=[StepView(step=1, train=True, unfinished=unfinished, total=8, ready=2)],
        capacity=4,
        scheduler=SchedulerConfig.model_validate({"policy": policy}),
    )
    assert decide(view).assignments == {}
