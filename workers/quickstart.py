"""`gyre quickstart`: a real (tiny) policy learns small terminal tasks on this machine, through every real component.

Prepares what is cached (policy, tasks), starts the local stack, submits a run, shows its progress, and draws the
curve. The numbers below are what the tiny policy learns well with; they are no defaults for other policies.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from infra.settings import Settings
from infra.state.redis import redis_client
from infra.temporal import connect
from trajectory.config import OptimizerConfig, TrajectoryConfig
from workers.chart import draw_curve
from workers.errors import UsageError
from workers.progress import start_run, watch
from workers.stack.local import down, up
from workers.stack.memory import PeakMemory
from workflows.contracts.configuration import (
    BudgetConfig,
    EvaluationConfig,
    RunConfig,
    SamplingConfig,
    TaskSets,
)

CACHE = Path(".cache")
HELDOUT_TASKS = 200
TRAIN_TASKS = 600
Say = Callable[[str], None]


def prepare(seed: int, say: Say) -> Path:
    """The tiny policy's folder, also linked as the stack's default policy."""
    from infra.quickstart.prepare import prepare_policy

    folder = prepare_policy(CACHE / "policy", seed=seed, progress=say)
    link = CACHE / "policy" / "default"
    part = link.with_name("default.part")
    part.unlink(missing_ok=True)
    part.symlink_to(folder.name)
    os.replace(part, link)
    return folder


def prepare_tasks(seed: int) -> TaskSets:
    """Training and held-out tasks, which share no instance; the held-out ones are the same for every seed."""
    from infra.quickstart.tasks import write_task_set

    sets = {}
    for name, count, task_seed, held_out in (
        (f"train-{seed}", TRAIN_TASKS, seed, False),
        ("heldout", HELDOUT_TASKS, 0, True),
    ):
        folder = CACHE / "tasks" / f"{name}-{count}"
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            write_task_set(part, seed=task_seed, count=count, held_out=held_out)
            part.rename(folder)
        sets[name.split("-")[0]] = str((folder / "tasks").absolute())
    return TaskSets(train=sets["train"], heldout=sets["heldout"])


def quickstart_config(name: str, policy: Path, tasks: TaskSets, *, seed: int, steps: int, staleness: int) -> RunConfig:
    return RunConfig(
        name=name,
        policy=str(policy.absolute()),
        tasks=tasks,
        task_order="given",  # the set goes round the families: a step has one task of each
        harness="mini",
        steps=steps,
        tasks_per_step=4,
        group_size=16,
        max_staleness=staleness,
        seed=seed,
        sampling=SamplingConfig(temperature=1.0, max_new_tokens=48, context_limit=4096, max_calls=20),
        budget=BudgetConfig(active_s=120, wall_s=900),
        optimizer=OptimizerConfig(lr=7e-4, betas=(0.9, 0.95), weight_decay=0.0, clip_grad=1.0),
        trajectory=TrajectoryConfig(token_budget=8192),
        evaluation=EvaluationConfig(every=10, tasks=HELDOUT_TASKS),
    )


async def run_quickstart(*, seed: int, steps: int, staleness: int, keep: bool, console: Console) -> None:
    """Raises UsageError when the stack does not start or the run fails."""
    started = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.1f} s[/] {line}")

    policy = await asyncio.to_thread(prepare, seed, say)
    tasks = await asyncio.to_thread(prepare_tasks, seed)
    settings = Settings(policy=policy)
    try:
        await up(settings, say)
        await _train(settings, policy, tasks, seed=seed, steps=steps, staleness=staleness, console=console)
        console.print(f"took {time.monotonic() - started:.0f} s")
    finally:
        if not keep:
            await down(settings)
    state = "goes on (`gyre down` ends it)" if keep else "is down (`gyre up` brings it back)"
    console.print(f"the stack {state}; Temporal UI: {settings.temporal_ui}")


async def _train(
    settings: Settings, policy: Path, tasks: TaskSets, *, seed: int, steps: int, staleness: int, console: Console
) -> None:
    name = f"quickstart-{seed}-{int(time.time())}"
    config = quickstart_config(name, policy, tasks, seed=seed, steps=steps, staleness=staleness)
    client = await connect(settings)
    console.print(f"run {name}; Temporal UI: {settings.temporal_ui}")
    memory = PeakMemory(settings)
    async with redis_client(settings.redis) as redis:
        await start_run(client, settings, config, f"quickstart, seed {seed}")
        view = await watch(client, redis, settings, name, console=console, on_look=lambda _: memory.look())
    if view.status != "COMPLETED":
        raise UsageError(f"run {name} ended as {view.status}: {settings.temporal_ui} has its history")
    picture = settings.root / "runs" / name / "pass_rate.png"
    draw_curve(view.run.results, f"{name}: pass rate", picture)
    evaluations = [result for result in view.run.results if not result.train]
    curve = ", ".join(f"v{result.version}: {result.pass_rate:.3f}" for result in evaluations)
    console.print(f"held-out pass rate over {evaluations[-1].valid} tasks: {curve}")
    console.print(f"peak memory of the stack: {memory.peak_bytes / 2**30:.1f} GiB (PSS)")
    console.print(f"curve: {picture}")
