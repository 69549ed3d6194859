"""What a cell's worker does beside processes that stand still, and with orders from before its cell was lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities import presence
from activities.cells import CellActivities
from activities.presence import Presence, Silent
from activities.services import Services
from infra.megatron.protocol import ReplicaClient
from infra.settings import Settings
from infra.state.keys import Route
from infra.state.routes import get_route, set_route
from trajectory.config import LossConfig, OptimizerConfig
from workflows.contracts.orders import CellOrder, Desired, RunContext, TrainInput

STAND_IN = """
import asyncio, sys
from aiohttp import web

async def status(request):
    return web.json_response(dict(incarnation="i", run=None, version=-1, optimizer_version=-1, step=None, done=[],
                                  resident_bytes=0, busy=None))

async def train(request):
    await asyncio.sleep(1.5)
    return web.json_response(dict(stats={}, seconds=1.5))

app = web.Application()
app.add_routes([web.get("/status", status), web.post("/train", train)])
web.run_app(app, path=sys.argv[1], print=None)
"""
"""Stands in for a replica: it trains for 1.5 s, and answers looks meanwhile."""

CLAIM = TrainInput(cell="cell-0", incarnation="i", run="r", step=1, version=0, micro_steps=[])


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", STAND_IN, str(tmp_path / "replica.sock")])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_a_long_call_ends_when_its_replica_stands_still_and_not_while_it_is_busy(
    replica: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "LOOK_S", 0.5)
    monkeypatch.setattr(presence, "EVERY_S", 0.05)
    socket = tmp_path / "replica.sock"
    async with asyncio.timeout(60), ReplicaClient(socket) as client:
        cell = Presence(client)
        while (await cell.look()).missing:
            await asyncio.sleep(0.1)
        assert (await cell.while_answering(client.train(CLAIM))).seconds == 1.5
        claim = asyncio.create_task(cell.while_answering(client.train(CLAIM)))
        os.kill(replica.pid, signal.SIGSTOP)
        with pytest.raises(Silent, match="replica"):
            await claim
        assert (await cell.look()).missing == "replica"
        os.kill(replica.pid, signal.SIGCONT)
        assert (await cell.look()).replica == "i"


@pytest.mark.parametrize("role", ["serve_rollout", "prepare_training"])
async def test_an_order_from_before_the_cell_was_lost_does_nothing(redis: Redis, tmp_path: Path, role: str) -> None:
    closed = Route(cell="cell-0", url="http://127.0.0.1:1", incarnation="i", epoch=5, open=False, version=1)
    await set_route(redis, closed)
    context = RunContext(run="r", policy="p", optimizer=OptimizerConfig(), loss=LossConfig())
    stale = CellOrder(cell="cell-0", desired=Desired(epoch=4, role="rollout", candidate_ref="c", context=context))
    unused = await Client.connect("127.0.0.1:1", lazy=True)
    cell = CellActivities(Services(Settings(home=tmp_path), unused, redis), "cell-0")
    with pytest.raises(ApplicationError, match="epoch 5 was given since"):
        await ActivityEnvironment().run(getattr(cell, role), stale)
    assert await get_route(redis, "cell-0") == closed
