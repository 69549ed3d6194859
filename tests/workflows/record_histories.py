"""Record the histories that the replay test replays: `python tests/workflows/record_histories.py RUN LABEL`.

RUN is a finished run of a stack that is up; LABEL says what of gyre it was the first to show. Histories of before stay:
what ran then must go on. Take one out only when a change of workflow code is meant to break workflows that are running;
otherwise guard the change with `workflow.patched`.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
from pathlib import Path

from infra.settings import Settings
from infra.temporal import connect
from workflows import names

FOLDER = Path(__file__).parent / "histories"


async def record(run: str, label: str) -> None:
    settings = Settings()
    client = await connect(settings)
    ids = {
        "run": names.run_id(run),
        "evaluation": names.step_id(run, 0),
        "step": names.step_id(run, 1),
        "group": names.group_id(run, 1, 0),
        "scheduler": names.scheduler_id(settings.pool),
        "cell": names.cell_id("cell-0"),
    }
    FOLDER.mkdir(exist_ok=True)
    for name, workflow_id in ids.items():
        history = await client.get_workflow_handle(workflow_id).fetch_history()
        data = gzip.compress(history.to_json().encode(), mtime=0)
        (FOLDER / f"{name}.{label}.json.gz").write_bytes(data)
        print(f"{name}: {len(history.events)} events, {len(data)} bytes")


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1], sys.argv[2]))
