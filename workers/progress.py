"""A run is started, and `gyre watch` shows its live progress, from the workflows' own queries and the counts in Redis.

A line per step that has ended, and one live line: step, watermark, the cells' roles, the pass rate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from rich.console import Console
from rich.status import Status
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from infra.settings import Settings
from infra.state import demand
from infra.temporal import ANSWER
from workers.errors import UsageError
from workflows import names
from workflows.contracts.configuration import RunConfig
from workflows.contracts.results import RunStatus, StepResult
from workflows.run import Run, RunState
from workflows.scheduler import Scheduler, SchedulerState


@dataclass(frozen=True)
class View:
    run: RunStatus
    scheduler: SchedulerState | None
    watermark: dict[int, int]
    """Open step -> queued and running episodes."""
    ended: bool
    status: str


async def start_run(client: Client, settings: Settings, config: RunConfig, summary: str) -> None:
    """Raises UsageError when there is a run of that name, ended or not."""
    try:
        await client.start_workflow(
            Run.run,
            RunState(config=config, pool=settings.pool),
            id=names.run_id(config.name),
            task_queue=names.CONTROL_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            static_summary=summary,
        )
    except WorkflowAlreadyStartedError:
        raise UsageError(f"there is a run {config.name!r} already: give this one another name") from None


async def look(client: Client, redis: Redis, settings: Settings, run: str) -> View:
    """One look at a run. Raises UsageError when there is none of that name."""
    handle = client.get_workflow_handle_for(Run.run, names.run_id(run))
    try:
        description = await handle.describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise UsageError(f"there is no run {run!r}: `gyre status` lists the runs") from None
        raise
    status = await handle.query(Run.status, rpc_timeout=ANSWER)
    execution = description.status or WorkflowExecutionStatus.RUNNING
    scheduler = None
    if execution is WorkflowExecutionStatus.RUNNING:
        entity = client.get_workflow_handle_for(Scheduler.run, names.scheduler_id(settings.pool))
        scheduler = await entity.query(Scheduler.status, rpc_timeout=ANSWER)
    watermark = {step: (await demand.demand_of(redis, run, step)).unfinished for step in status.open_steps}
    return View(status, scheduler, watermark, execution is not WorkflowExecutionStatus.RUNNING, execution.name)


def live_line(view: View) -> str:
    steps = ", ".join(f"step {step}: watermark {count}" for step, count in view.watermark.items()) or "no open step"
    cells = " ".join(f"{cell}={role}" for cell, role in roles(view.scheduler).items())
    evaluations = [result for result in view.run.results if not result.train]
    rate = f"held-out pass rate {evaluations[-1].pass_rate:.3f}" if evaluations else "not evaluated yet"
    return f"version {view.run.trained_version} · {steps} · {cells} · {rate}"


def roles(scheduler: SchedulerState | None) -> dict[str, str]:
    if scheduler is None:
        return {}
    told: dict[str, str] = {}
    for cell in scheduler.cells:
        desired = scheduler.desired.get(cell)
        role = desired.role if desired is not None else "idle"
        told[cell] = "core" if desired is not None and desired.core and role == "train" else role
    return told | dict.fromkeys(told.keys() & scheduler.lost, "lost")


def step_line(result: StepResult) -> str:
    outcomes = " ".join(f"{name}={count}" for name, count in sorted(result.outcomes.items()))
    if not result.train:
        return (
            f"step {result.step:>3}  evaluate v{result.version:<3} pass {result.pass_rate:.3f} "
            f"of {result.valid}  {result.seconds:5.1f} s  {outcomes}"
        )
    gauge = result.train_stats.get("max_token_delta", 0.0)
    return (
        f"step {result.step:>3}  train → v{result.version:<3} pass {result.pass_rate:.3f} "
        f"reward {result.mean_reward:.3f}  {result.seconds:5.1f} s  {result.micro_steps} micro-steps  "
        f"|g| {result.grad_norm:.3f}  |Δlogp| {gauge:.1e}  moved {result.moved_calls}{_from_store(result)}  "
        f"left rollout beside {result.episodes_running_at_first_switch} running episodes  {outcomes}"
    )


def _from_store(result: StepResult) -> str:
    """How much of the moved prefixes came from the KV store; nothing when nothing moved."""
    if not result.moved_tokens:
        return ""
    return f" ({result.moved_from_store / result.moved_tokens:.0%} of {result.moved_tokens} tokens from the store)"


async def watch(
    client: Client,
    redis: Redis,
    settings: Settings,
    run: str,
    *,
    console: Console,
    on_look: Callable[[View], None] = lambda view: None,
) -> View:
    """Show progress until the run has ended; returns the last look."""
    shown = -1
    with console.status("", spinner="dots") as live:
        while True:
            view = await _patiently(client, redis, settings, run, live)
            on_look(view)
            for result in view.run.results:
                if result.step > shown:
                    shown = result.step
                    console.print(step_line(result))
            live.update(live_line(view))
            if view.ended:
                return view
            await asyncio.sleep(1.0)


async def _patiently(client: Client, redis: Redis, settings: Settings, run: str, live: Status) -> View:
    """A server or worker that restarts must not end the watching; five minutes of silence do."""
    for _ in range(60):
        try:
            return await look(client, redis, settings, run)
        except (RPCError, ConnectionError, OSError) as error:
            live.update(f"waiting for the stack: {error}")
            await asyncio.sleep(5)
    raise UsageError("the stack has not answered for five minutes: `gyre status` shows its processes")


def as_json(view: View) -> dict[str, Any]:
    return {
        **view.run.model_dump(mode="json"),
        "status": view.status,
        "watermark": view.watermark,
        "roles": roles(view.scheduler),
        "reason": view.scheduler.reason if view.scheduler else "",
    }
