"""Runs of ``bench elastic``: a stack of its own, and one short run for each policy and round on its cells.

A run's first step is a warm-up and isn't measured: it leaves the cells as a step leaves them, whatever run was before.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import WorkflowIDReusePolicy

from infra.episodes.launch import Registration
from infra.episodes.processes import signal_named
from infra.settings import Settings
from infra.temporal import connect
from tests.bench.elastic.paced_harness import PLUGIN, Paced
from tests.bench.processes import add_to_path
from trajectory.config import OptimizerConfig, TrajectoryConfig
from workers.errors import UsageError
from workers.stack.local import down, running_harnesses, up
from workflows import names
from workflows.contracts.configuration import (
    BudgetConfig,
    EvaluationConfig,
    RunConfig,
    SamplingConfig,
    SchedulerConfig,
    TaskSets,
)
from workflows.contracts.results import RunStatus, StepResult, SubmitStep
from workflows.run import Run, RunOutcome, RunState

Say = Callable[[str], None]
END_S: Final = 15.0
BEGUN_S: Final = 5.0


@dataclass(frozen=True)
class MeasuredRun:
    """What became of a run's measured steps."""

    policy: str
    round: int
    name: str
    seconds: list[float]
    """Of each step: from its opening to its end."""
    results: list[StepResult]


@asynccontextmanager
async def stack(settings: Settings, say: Say) -> AsyncIterator[Client]:
    """A local stack that is there inside the context, and of which nothing is left after it."""
    add_to_path(PLUGIN)
    try:
        await up(settings, say)
        yield await connect(settings)
    finally:
        deadline = time.monotonic() + BEGUN_S
        while not await down(settings) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)  # interrupted before the supervisor had said that it is there
        await _end_harnesses(settings)


async def _end_harnesses(settings: Settings) -> None:
    """Harnesses outlive a stack; these are nobody's."""
    deadline = time.monotonic() + END_S
    while running_harnesses(settings) and time.monotonic() < deadline:
        for file in settings.episodes.glob("*/*/*/*/supervisor.json"):
            there = Registration.model_validate_json(file.read_bytes())
            if there.alive():
                (file.parent / "cancel").touch()
                signal_named(there.pid, there.start, 15)
        await asyncio.sleep(0.2)


def run_config(
    name: str,
    settings: Settings,
    tasks: Path,
    scheduler: SchedulerConfig,
    *,
    group_size: int,
    staleness: int,
    token_budget: int,
) -> RunConfig:
    """Of a run whose first step, one group, is the warm-up."""
    return RunConfig(
        name=name,
        policy=str(settings.policy),
        tasks=TaskSets(train=str(tasks)),
        task_order="given",
        harness=Paced.name,
        steps=1,
        tasks_per_step=1,
        group_size=group_size,
        max_staleness=staleness,
        sampling=SamplingConfig(max_new_tokens=64, context_limit=settings.context_length, max_calls=200),
        budget=BudgetConfig(active_s=600, wall_s=1200),
        optimizer=OptimizerConfig(lr=1e-6),
        trajectory=TrajectoryConfig(token_budget=token_budget),
        evaluation=EvaluationConfig(every=0),
        scheduler=scheduler,
        record_gradients=False,
    )


async def run_steps(
    client: Client, settings: Settings, config: RunConfig, groups: list[int], deadline_s: float
) -> list[StepResult]:
    """Run the warm-up and then a step of so many groups each; the results of those. Raises UsageError."""
    handle: WorkflowHandle[Run, RunOutcome] = await client.start_workflow(
        Run.run,
        RunState(config=config, pool=settings.pool),
        id=names.run_id(config.name),
        task_queue=names.CONTROL_QUEUE,
        id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
        static_summary=f"bench elastic: {config.name}",
    )
    try:
        async with asyncio.timeout(deadline_s):
            while (await handle.query(Run.status)).steps_opened == 0:
                await asyncio.sleep(0.05)
            for count in groups:
                request = SubmitStep(request_id=uuid.uuid4().hex, train=True, tasks=count)
                await handle.execute_update(Run.submit_step, request, id=request.request_id)
            await handle.result()
            status: RunStatus = await handle.query(Run.status)
    except TimeoutError:
        raise UsageError(
            f"run {config.name} takes longer than {deadline_s:.0f} s: {settings.temporal_ui} shows it"
        ) from None
    except WorkflowFailureError as error:
        raise UsageError(f"run {config.name} failed: {error.cause}") from error
    results = sorted((result for result in status.results if result.train), key=lambda result: result.version)
    return results[1:]


async def closings(client: Client, run: str, steps: int) -> list[float]:
    """Seconds from each step's closing to the next one's, the warm-up's first."""
    closed = []
    for step in range(steps + 1):
        described = await client.get_workflow_handle(names.step_id(run, step)).describe()
        if described.close_time is None:
            raise UsageError(f"step {step} of {run} has not ended")
        closed.append(described.close_time.timestamp())
    return [end - start for start, end in pairwise(closed)]
