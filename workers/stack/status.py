"""`gyre status`: the local stack's processes, the cells, and every run that Temporal knows."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from temporalio.client import Client, WorkflowExecutionStatus

from infra.settings import Settings
from infra.temporal import ANSWER, TemporalUnreachable, connect
from workers.errors import UsageError
from workers.progress import roles
from workers.stack.local import read_state
from workflows import names
from workflows.scheduler import Scheduler


async def collect(settings: Settings) -> dict[str, Any]:
    """Raises UsageError when neither a local stack nor a Temporal server is there."""
    stack = read_state(settings)
    try:
        client = await connect(settings)
    except TemporalUnreachable as error:
        if stack is None:
            raise UsageError(f"the local stack is not running (`gyre up`), and {error}") from None
        raise
    scheduler = await client.get_workflow_handle_for(Scheduler.run, names.scheduler_id(settings.pool)).query(
        Scheduler.status, rpc_timeout=ANSWER
    )
    return {
        "temporal": settings.temporal,
        "temporal_ui": settings.temporal_ui,
        "processes": stack["processes"] if stack else {},
        "pool": settings.pool,
        "leased_to": scheduler.lease.run if scheduler.lease else "",
        "cells": roles(scheduler),
        "lost": scheduler.lost,
        "version": scheduler.version,
        "reason": scheduler.reason,
        "runs": await list_runs(client),
    }


async def list_runs(client: Client) -> list[dict[str, str]]:
    runs = []
    async for execution in client.list_workflows("WorkflowType='gyre.Run'"):
        status = execution.status or WorkflowExecutionStatus.RUNNING
        if status is WorkflowExecutionStatus.CONTINUED_AS_NEW:
            continue
        started = execution.start_time.isoformat(timespec="seconds")
        runs.append({"run": execution.id.removeprefix("gyre/"), "status": status.name, "started": started})
    return runs


def print_status(status: dict[str, Any], console: Console) -> None:
    processes = Table("process", "pid", "ready", "restarts", box=None)
    for name, process in status["processes"].items():
        processes.add_row(name, str(process["pid"]), "yes" if process["ready"] else "no", str(process["restarts"]))
    console.print(processes)
    console.print(f"Temporal {status['temporal']}, UI {status['temporal_ui']}")
    cells = " ".join(f"{cell}={role}" for cell, role in status["cells"].items())
    leased = status["leased_to"] or "nobody"
    console.print(f"pool {status['pool']}: {cells}; version {status['version']}; leased to {leased}")
    for cell, reason in status["lost"].items():
        console.print(f"{cell} is lost: {reason}")
    console.print(f"last decision: {status['reason']}")
    for run in status["runs"]:
        console.print(f"run {run['run']}: {run['status']}, started {run['started']}")
