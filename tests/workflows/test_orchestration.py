"""Runs on a real Temporal server with a scripted cluster: what is opened, trained, committed, and what faults do."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from scripted_cluster import ScriptedCluster
from small_packages import packages_read_anew, put_package
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.common import SearchAttributeKey
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Replayer, Worker

from activities.plugins import check_plugins
from workers.worker import WORKFLOWS
from workflows import names
from workflows.cell import Cell, CellState
from workflows.contracts.configuration import EvaluationConfig, RunConfig, SchedulerConfig, TaskSets
from workflows.contracts.orders import LeaseRequest, RunContext
from workflows.contracts.results import EpisodeInput, Outcome, PauseRequest, SubmitStep
from workflows.run import Run, RunOutcome, RunState, draw_tasks
from workflows.scheduler import Scheduler, SchedulerState

pytestmark = pytest.mark.stack

ATTRIBUTES = {
    "Keyword": SearchAttributeKey.for_keyword,
    "Int": SearchAttributeKey.for_int,
    "Double": SearchAttributeKey.for_float,
}


@contextlib.asynccontextmanager
async def temporal() -> AsyncIterator[Client]:
    binary = Path(sys.executable).parent / "temporal"
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(binary),
        data_converter=pydantic_data_converter,
        search_attributes=[ATTRIBUTES[kind](name) for name, kind in names.SEARCH_ATTRIBUTES.items()],
    )
    async with environment:
        yield environment.client


@contextlib.asynccontextmanager
async def pool(
    cluster: ScriptedCluster, cells: int = 2, capacity: int = 4, history_limit: int = 4000
) -> AsyncIterator[Client]:
    """A Temporal server, workers on every queue, and the pool's entities."""
    async with temporal() as client, contextlib.AsyncExitStack() as workers:
        cell_names = [f"cell-{i}" for i in range(cells)]
        queues = [names.CONTROL_QUEUE, names.HARNESS_QUEUE, names.GRADE_QUEUE, names.TRAJECTORY_QUEUE]
        for queue in [*queues, *map(names.cell_queue, cell_names)]:
            await workers.enter_async_context(
                Worker(
                    client,
                    task_queue=queue,
                    workflows=WORKFLOWS if queue == names.CONTROL_QUEUE else [],
                    activities=cluster.activities(),
                )
            )
        for cell in cell_names:
            await client.start_workflow(
                Cell.run,
                CellState(cell=cell, history_limit=history_limit),
                id=names.cell_id(cell),
                task_queue=names.CONTROL_QUEUE,
            )
        await client.start_workflow(
            Scheduler.run,
            SchedulerState(pool="local", cells=cell_names, capacity=capacity, history_limit=history_limit),
            id=names.scheduler_id("local"),
            task_queue=names.CONTROL_QUEUE,
        )
        yield client


def config(**changes: object) -> RunConfig:
    fields: dict[str, object] = {
        "name": "r1",
        "policy": "policy",
        "tasks": TaskSets(train="train", heldout="heldout"),
        "steps": 2,
        "tasks_per_step": 2,
        "group_size": 4,
        "evaluation": EvaluationConfig(every=1, tasks=5),
        "scheduler": SchedulerConfig(satellite_s=0),
    }
    return RunConfig.model_validate({**fields, **changes})


async def start(client: Client, run: RunConfig) -> WorkflowHandle[Run, RunOutcome]:
    return await client.start_workflow(
        Run.run, RunState(config=run, pool="local"), id=names.run_id(run.name), task_queue=names.CONTROL_QUEUE
    )


async def runs_of(client: Client, workflow_id: str) -> int:
    """How many runs the workflow has had: continue-as-new starts another."""
    return len([execution async for execution in client.list_workflows(f"WorkflowId = '{workflow_id}'")])


async def replay(client: Client, *workflow_ids: str) -> None:
    replayer = Replayer(workflows=WORKFLOWS, data_converter=pydantic_data_converter)
    for workflow_id in workflow_ids:
        await replayer.replay_workflow(await client.get_workflow_handle(workflow_id).fetch_history())


async def test_a_run_evaluates_trains_and_commits_each_version_once() -> None:
    cluster = ScriptedCluster()
    async with pool(cluster) as client:
        handle = await start(client, config())
        outcome = await asyncio.wait_for(handle.result(), 60)
        assert outcome.version == 2
        assert [version for version, _ in outcome.curve] == [0, 1, 2]
        committed = [(c.version, c.result.train) for c in cluster.committed]
        assert committed == [(0, False), (1, True), (1, False), (2, True), (2, False)]
        assert [finish.normaliser for finish in cluster.finished] == [8, 8]
        served = [entry for kind, entry in cluster.log if kind == "serve"]
        assert {version for _, version, _ in served} == {0, 1, 2}
        await replay(client, "gyre/r1", "gyre/r1/step/000001", "gyre/r1/step/000001/g/000", names.cell_id("cell-0"))
        await replay(client, names.scheduler_id("local"))


async def test_a_cell_leaves_rollout_while_episodes_run_and_serves_again() -> None:
    cluster = ScriptedCluster(episode_s=lambda episode: 0.05 if episode.group == 0 else 2.0)
    async with pool(cluster) as client:
        handle = await start(client, config(steps=1, evaluation=EvaluationConfig(every=0)))
        await asyncio.wait_for(handle.result(), 60)
        (commit,) = cluster.committed
        assert commit.result.core == "cell-0"
        claims = [order for order in cluster.finished[0].micro_steps]
        assert len(claims) == 4
        kinds = [kind for kind, entry in cluster.log if kind in ("serve", "train") and entry[0] == "cell-0"]
        assert kinds == ["serve", "train", "serve"]


async def test_a_lost_replica_takes_its_sum_along_and_the_work_is_done_again() -> None:
    cluster = ScriptedCluster(lose_claim={"cell-0"})
    async with pool(cluster) as client:
        handle = await start(client, config(steps=1, evaluation=EvaluationConfig(every=0)))
        outcome = await asyncio.wait_for(handle.result(), 60)
        assert outcome.version == 1
        assert cluster.finished[-1].incarnation != "cell-0#0"


async def test_every_outcome_is_counted_and_only_real_rewards_train() -> None:
    outcomes = [Outcome.COMPLETED, Outcome.TIMED_OUT, Outcome.INFRA_FAILED, Outcome.COMPLETED]

    def outcome(episode: EpisodeInput) -> Outcome:
        return outcomes[episode.index]

    cluster = ScriptedCluster(outcome=outcome, reward=lambda episode: -1.0 if episode.endswith("03") else 0.5)
    async with pool(cluster) as client:
        handle = await start(client, config(steps=1, evaluation=EvaluationConfig(every=0)))
        await asyncio.wait_for(handle.result(), 60)
        result = cluster.committed[0].result
        assert result.outcomes == {"completed": 2, "timed_out": 2, "infra_failed": 2, "evaluator_failed": 2}
        assert (result.valid, result.mean_reward) == (4, 0.5)
        assert cluster.finished[0].normaliser == 4


@pytest.mark.parametrize("staleness", [0, 1])
async def test_steps_overlap_by_the_allowed_staleness_and_no_more(staleness: int) -> None:
    cluster = ScriptedCluster()
    async with pool(cluster) as client:
        run = config(steps=4, evaluation=EvaluationConfig(every=0), max_staleness=staleness)
        handle = await start(client, run)
        await asyncio.wait_for(handle.result(), 90)
        trained, most = 0, 0
        for kind, entry in cluster.log:
            if kind == "open":
                most = max(most, entry.version - trained)
            elif kind == "close":
                trained += 1
        assert most <= staleness
        assert [commit.version for commit in cluster.committed] == [1, 2, 3, 4]


async def test_pause_stops_admission_resume_goes_on_and_a_repeated_request_counts_once() -> None:
    cluster = ScriptedCluster()
    async with pool(cluster) as client:
        handle = await start(client, config(steps=2, evaluation=EvaluationConfig(every=0)))
        await handle.execute_update(Run.pause, PauseRequest(request_id="p"))
        await asyncio.sleep(1.0)
        opened = sum(kind == "open" for kind, _ in cluster.log)
        assert opened <= 1
        queued = [await handle.execute_update(Run.submit_step, SubmitStep(request_id="s", tasks=3)) for _ in range(2)]
        assert queued == [1, 1]
        await handle.execute_update(Run.resume, PauseRequest(request_id="q"))
        outcome = await asyncio.wait_for(handle.result(), 60)
        assert outcome.version == 2
        assert [commit.result.episodes for commit in cluster.committed if not commit.result.train] == [3]


async def test_an_evaluation_without_heldout_tasks_is_refused_before_it_is_queued() -> None:
    async with pool(ScriptedCluster(episode_s=lambda _: 5)) as client:
        handle = await start(client, config(tasks=TaskSets(train="train")))
        with pytest.raises(WorkflowUpdateFailedError):
            await handle.execute_update(Run.submit_step, SubmitStep(request_id="s"))
        await handle.cancel()
        with pytest.raises(WorkflowFailureError):
            await asyncio.wait_for(handle.result(), 30)


async def test_continue_as_new_loses_nothing() -> None:
    cluster = ScriptedCluster()
    async with pool(cluster, history_limit=40) as client:
        run = config(steps=4, evaluation=EvaluationConfig(every=2, tasks=3), max_staleness=1)
        handle = await client.start_workflow(
            Run.run,
            RunState(config=run, pool="local", history_limit=40),
            id=names.run_id(run.name),
            task_queue=names.CONTROL_QUEUE,
        )
        request = SubmitStep(request_id="once", tasks=3)
        assert await handle.execute_update(Run.submit_step, request) == 1
        while await runs_of(client, "gyre/r1") < 2:
            await asyncio.sleep(0.1)
        current = client.get_workflow_handle_for(Run.run, names.run_id(run.name))
        assert await current.execute_update(Run.submit_step, request) == 0, "handled before, and not forgotten"
        outcome = await asyncio.wait_for(handle.result(), 90)
        assert outcome.version == 4
        assert [commit.version for commit in cluster.committed if commit.result.train] == [1, 2, 3, 4]
        evaluated = sorted(commit.version for commit in cluster.committed if not commit.result.train)
        assert len(evaluated) == 4 and {0, 2, 4} <= set(evaluated)
        assert await runs_of(client, names.scheduler_id("local")) > 1
        assert await runs_of(client, names.cell_id("cell-0")) > 1


async def test_a_pause_that_holds_closes_every_route_and_resume_opens_them() -> None:
    cluster = ScriptedCluster(episode_s=lambda _: 3.0)
    async with pool(cluster) as client:
        handle = await start(client, config(steps=1, evaluation=EvaluationConfig(every=0)))
        while not any(kind == "open" for kind, _ in cluster.log):
            await asyncio.sleep(0.05)
        scheduler = client.get_workflow_handle_for(Scheduler.run, names.scheduler_id("local"))
        await handle.execute_update(Run.pause, PauseRequest(request_id="p", hold=True))

        async def roles() -> set[str]:
            state = await scheduler.query(Scheduler.status)
            return {desired.role for desired in state.desired.values()}

        async with asyncio.timeout(20):
            while await roles() != {"idle"}:
                await asyncio.sleep(0.05)
            await handle.execute_update(Run.resume, PauseRequest(request_id="q"))
            while "rollout" not in await roles():
                await asyncio.sleep(0.05)
        outcome = await asyncio.wait_for(handle.result(), 60)
        assert outcome.version == 1


async def test_a_second_run_waits_for_the_pool_and_then_gets_it() -> None:
    cluster = ScriptedCluster()
    async with pool(cluster) as client:
        short = {"steps": 1, "evaluation": EvaluationConfig(every=0)}
        first = await start(client, config(name="r1", **short))
        second = await start(client, config(name="r2", **short))
        await asyncio.wait_for(asyncio.gather(first.result(), second.result()), 60)
        assert sorted(commit.run for commit in cluster.committed) == ["r1", "r2"]


async def test_a_run_that_was_terminated_passes_the_pool_on() -> None:
    cluster = ScriptedCluster(episode_s=lambda episode: 3600 if episode.run == "r1" else 0.02)
    async with pool(cluster) as client:
        short = {"steps": 1, "evaluation": EvaluationConfig(every=0)}
        first = await start(client, config(name="r1", **short))
        scheduler = client.get_workflow_handle_for(Scheduler.run, names.scheduler_id("local"))
        while (await scheduler.query(Scheduler.status)).lease is None:
            await asyncio.sleep(0.05)
        await first.terminate("gone without a word")
        cluster.terminated.add("r1")
        second = await start(client, config(name="r2", **short))
        await asyncio.wait_for(second.result(), 60)
        await replay(client, names.scheduler_id("local"))


async def test_a_pool_that_is_granted_to_nobody_goes_to_the_next() -> None:
    cluster = ScriptedCluster()
    async with pool(cluster) as client:
        scheduler = client.get_workflow_handle_for(Scheduler.run, names.scheduler_id("local"))
        run = config(name="never", steps=1)
        context = RunContext(run="never", policy="policy", optimizer=run.optimizer, loss=run.loss)
        ask = LeaseRequest(run="never", version=0, candidate_ref="c", context=context, scheduler=run.scheduler)
        await scheduler.signal(Scheduler.request_lease, ask)
        short = {"steps": 1, "evaluation": EvaluationConfig(every=0)}
        first = await start(client, config(name="r1", **short))
        await asyncio.wait_for(first.result(), 60)


LAST_CELL_TRAINS = """
from workflows.scheduling.pool_view import assign, oldest_training

def last_cell_trains(view):
    step = oldest_training(view)
    view = view.model_copy(update={"cells": view.cells[::-1]})
    return assign(view, step, 1 if step and not step.unfinished else 0, "the last cell trains")
"""


async def test_the_policy_of_an_installed_package_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    put_package(tmp_path, "last_cell", "gyre.scheduling_policies", LAST_CELL_TRAINS, last_cell="last_cell_trains")
    with packages_read_anew():
        check_plugins()  # as a worker does when it starts
        cluster = ScriptedCluster()
        async with pool(cluster) as client:
            await asyncio.wait_for((await start(client, config(scheduler={"policy": "last_cell"}))).result(), 60)
            await replay(client, names.scheduler_id("local"))
        trained = {cell for kind, entry in cluster.log if kind == "train" for cell, _, _ in [entry]}
        assert trained == {"cell-1"}


def test_every_task_is_drawn_once_before_any_is_drawn_twice() -> None:
    drawn = [task for version in range(5) for task in draw_tasks(10, 4, seed=3, version=version)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert draw_tasks(10, 4, seed=3, version=2) == drawn[8:12]
