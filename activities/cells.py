"""Cell activities: drain a cell, serve rollout, become a trainer, and notice a process that was replaced or is silent.

`drain_cell` runs on the control queue, because the cell may be dead; the others run in the cell's own worker, beside
its engine and its replica. Invariant: orders to a cell are carried out one after the other, and never one whose epoch
the cell's route has passed: what a worker still holds from before it was lost does nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.beating import beating
from activities.engine_memory import EngineMemory
from activities.presence import MISSED, Presence, Silent
from activities.services import Services
from infra.megatron.protocol import ReplicaClient
from infra.sglang.client import EngineClient
from infra.sglang.errors import EngineError, EngineLost
from infra.state import demand, keys
from infra.state.routes import RouteOvertaken, get_route, set_route, wait_acknowledged
from workflows.contracts.orders import (
    CellOrder,
    CellReport,
    Desired,
    DrainInput,
    DrainResult,
    ReachCellInput,
    ServeOrder,
    WatchCellInput,
)

ENGINE_READY_S = 180.0
WATCH_S = 0.5
REACH_S = (0.25, 2.0)
"""Seconds between looks at a cell that is waited for: at first, and at most."""


def obsolete(error: RouteOvertaken) -> ApplicationError:
    return ApplicationError(str(error), type="Overtaken", non_retryable=True)


class DrainActivities:
    def __init__(self, services: Services) -> None:
        self._redis = services.redis

    @activity.defn(name="drain_cell")
    async def drain_cell(self, drain: DrainInput) -> DrainResult:
        """Close the cell's route and wait until no call runs there.

        Proxies leave the calls that run ``drain_s`` seconds to end by themselves; then they abort what is unfinished,
        and take its tokens along.
        """
        route = await get_route(self._redis, drain.cell)
        if route is None:
            return DrainResult(seconds=0, acknowledged=0, expired=0)
        epoch = max(route.epoch, drain.epoch)
        closed = route.model_copy(update={"open": False, "epoch": epoch, "drain_s": drain.drain_s})
        if route.epoch > drain.epoch:
            raise obsolete(RouteOvertaken(f"drain of {drain.cell}: epoch {drain.epoch} was overtaken"))
        try:
            await set_route(self._redis, closed)
            async with beating(detail=f"calls may end for {drain.drain_s:.0f} s"):
                return await wait_acknowledged(self._redis, closed, drain.deadline_s)
        except RouteOvertaken as error:
            raise obsolete(error) from error


class CellActivities:
    def __init__(self, services: Services, cell: str) -> None:
        self._services = services
        self._cell = cell
        self._engine_url = services.settings.engine_url(cell)
        self._replica = ReplicaClient(services.settings.replica_socket(cell))
        self._engine = EngineClient(self._engine_url, vocab_size=0)
        self._memory = EngineMemory(services.redis, self._engine, cell)
        self._presence = Presence(self._replica, self._engine)
        self._one_order = asyncio.Lock()

    @activity.defn(name="serve_rollout")
    async def serve_rollout(self, order: CellOrder) -> CellReport:
        """Weights of the desired version into the engine, then the route opens."""
        started, desired = time.monotonic(), order.desired
        async with beating(detail=f"version {desired.version}"), self._order(desired):
            try:
                await self._engine.wait_ready(min(ENGINE_READY_S, desired.lost_s))
            except EngineLost as error:
                raise Silent(str(error)) from error
            await self._memory.take_back()
            serve = ServeOrder(cell=order.cell, desired=desired, engine_url=self._engine_url)
            served = await self._presence.while_answering(self._replica.serve(serve))
            incarnation = await self._engine.incarnation()
            route = keys.Route(
                cell=self._cell,
                url=self._engine_url,
                incarnation=incarnation,
                epoch=desired.epoch,
                open=True,
                version=desired.version,
                weights=served.checksum,
            )
            try:
                await set_route(self._services.redis, route)
            except RouteOvertaken as error:
                raise obsolete(error) from error
        return served.model_copy(update={"engine": incarnation, "seconds": time.monotonic() - started})

    @activity.defn(name="prepare_training")
    async def prepare_training(self, order: CellOrder) -> CellReport:
        """Free the engine's memory, bring the replica to the step's version; the core with optimizer state."""
        started, desired = time.monotonic(), order.desired
        running = await demand.running_episodes(self._services.redis, desired.of_run.run)
        async with beating(detail=f"step {desired.step}"), self._order(desired):
            incarnation = await self._release_engine()
            prepared = await self._presence.while_answering(self._replica.prepare(order), needs_engine=False)
        took = time.monotonic() - started
        return prepared.model_copy(update={"engine": incarnation, "seconds": took, "running": running})

    @activity.defn(name="watch_cell")
    async def watch_cell(self, watch: WatchCellInput) -> CellReport:
        """Return when the engine or the replica is another process than the one that was prepared, or is silent."""
        silent = 0
        async with beating():
            while True:
                seen = await self._presence.look(needs_engine=watch.needs_engine)
                silent = silent + 1 if seen.missing else 0
                # What doesn't answer is taken for what it was, until it has been silent for long enough.
                engine, replica = seen.engine or watch.engine, seen.replica or watch.replica
                if (engine, replica) != (watch.engine, watch.replica) or silent >= MISSED:
                    return CellReport(engine=engine, replica=replica, missing=seen.missing)
                await asyncio.sleep(WATCH_S)

    @activity.defn(name="reach_cell")
    async def reach_cell(self, reach: ReachCellInput) -> CellReport:
        """Return once every part of the cell answers; says meanwhile which doesn't."""
        wait_s, longest_s = REACH_S
        while True:
            seen = await self._presence.look(needs_engine=reach.needs_engine)
            if not seen.missing:
                return seen
            activity.heartbeat(seen.missing)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)

    @asynccontextmanager
    async def _order(self, desired: Desired) -> AsyncIterator[None]:
        """One order at a time. Raises the application error `Overtaken` when the cell has been given a newer one."""
        async with self._one_order:
            route = await get_route(self._services.redis, self._cell)
            if route is not None and route.epoch > desired.epoch:
                overtaken = f"order of epoch {desired.epoch} to {self._cell}: epoch {route.epoch} was given since"
                raise obsolete(RouteOvertaken(overtaken))
            yield

    async def _release_engine(self) -> str:
        """A dead engine has nothing to release: training goes on without it."""
        try:
            return await self._memory.release()
        except EngineError as error:
            activity.logger.warning("%s: the engine releases nothing: %s", self._cell, error)
            return ""
