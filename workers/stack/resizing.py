"""`gyre resize`: the cells of the pool, set while runs go on.

Invariant: a cell joins the pool only when its worker polls; one that doesn't is refused by name, with the mend. What
becomes of the work of a cell that leaves is the scheduler's and the step's to decide. Knows nothing of roles.
"""

from __future__ import annotations

import re
import uuid
from datetime import UTC, datetime, timedelta
from typing import Final

from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError, RPCStatusCode

from infra.settings import Settings
from infra.temporal import ANSWER
from workers.errors import UsageError
from workers.pollers import pollers
from workflows import names
from workflows.cell import Cell, CellState
from workflows.contracts.results import ResizeRequest
from workflows.scheduler import Scheduler

POLLED: Final = timedelta(seconds=75)
"""A worker that lives has polled its queue within this time: a poll lasts a minute."""


async def resize(client: Client, settings: Settings, cells: list[str]) -> list[str]:
    """Set the pool's cells and return them. Raises UsageError when a cell that is to join has no worker."""
    scheduler = client.get_workflow_handle_for(Scheduler.run, names.scheduler_id(settings.pool))
    try:
        pool = (await scheduler.query(Scheduler.status, rpc_timeout=ANSWER)).cells
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise UsageError(f"pool {settings.pool} has no scheduler: `gyre up` starts it") from None
        raise
    for cell in (cell for cell in cells if cell not in pool):
        if not re.fullmatch(r"cell-\d{1,4}", cell):
            raise UsageError(f"{cell!r} is no cell: they are named cell-0, cell-1, …")
        polls = await pollers(client, names.cell_queue(cell))
        if not any(datetime.now(UTC) - at < POLLED for at in polls.values()):
            wanted = int(cell.removeprefix("cell-")) + 1
            raise UsageError(
                f"{cell} has no worker that polls {names.cell_queue(cell)}: start its processes first, here with "
                f"`gyre down` and `GYRE_CELLS={wanted} gyre up` (runs go on), elsewhere beside its engine and replica "
                f"with `python -m workers.worker --role cell --cell {cell}`"
            )
        await ensure_cell(client, settings, cell)
    request = ResizeRequest(request_id=uuid.uuid4().hex, cells=cells)
    resized: list[str] = await scheduler.execute_update("resize", request, result_type=list[str])
    return resized


async def ensure_cell(client: Client, settings: Settings, cell: str) -> None:
    """Start the cell's workflow unless it runs."""
    await client.start_workflow(
        Cell.run,
        CellState(cell=cell, pool=settings.pool),
        id=names.cell_id(cell),
        task_queue=names.CONTROL_QUEUE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        static_summary=f"cell {cell}",
    )
