"""Cell activities: drain a cell, serve rollout, become a trainer, and notice a process that was replaced.

`drain_cell` runs on the control queue, because the cell may be dead; the others run in the cell's own worker, beside
its engine and its replica.
"""

from __future__ import annotations

import asyncio
import time

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.beating import beating
from activities.services import Services
from infra import demand, keys
from infra.megatron.config import OptimizerConfig
from infra.megatron.protocol import PrepareRequest, ReplicaClient, ReplicaUnavailable, ServeRequest
from infra.routes import RouteOvertaken, get_route, set_route, wait_acknowledged
from infra.sglang.client import EngineClient
from infra.sglang.errors import EngineError
from trajectory.loss_config import LossConfig
from workflows.orders import CellOrder, CellReport, Desired, DrainInput, DrainResult, RunContext, WatchCellInput

ENGINE_READY_S = 180.0
WATCH_S = 0.5
MISSED = 6
"""Silent looks in a row after which a process counts as gone."""


def obsolete(error: RouteOvertaken) -> ApplicationError:
    return ApplicationError(str(error), type="Overtaken", non_retryable=True)


class DrainActivities:
    def __init__(self, services: Services) -> None:
        self._redis = services.redis

    @activity.defn(name="drain_cell")
    async def drain_cell(self, drain: DrainInput) -> DrainResult:
        """Close the cell's route; proxies abort what is unfinished there and take its tokens along."""
        route = await get_route(self._redis, drain.cell)
        if route is None:
            return DrainResult(seconds=0, acknowledged=0, expired=0)
        closed = route.model_copy(update={"open": False, "epoch": max(route.epoch, drain.epoch)})
        if route.epoch > drain.epoch:
            raise obsolete(RouteOvertaken(f"drain of {drain.cell}: epoch {drain.epoch} was overtaken"))
        try:
            await set_route(self._redis, closed)
        except RouteOvertaken as error:
            raise obsolete(error) from error
        async with beating():
            done = await wait_acknowledged(self._redis, closed, drain.deadline_s)
        return DrainResult(seconds=done.seconds, acknowledged=done.acknowledged, expired=done.expired)


class CellActivities:
    def __init__(self, services: Services, cell: str) -> None:
        self._services = services
        self._cell = cell
        self._engine_url = services.settings.engine_url(cell)
        self._replica = ReplicaClient(services.settings.replica_socket(cell))
        self._engine = EngineClient(self._engine_url, vocab_size=0)

    @activity.defn(name="serve_rollout")
    async def serve_rollout(self, order: CellOrder) -> CellReport:
        """Weights of the desired version into the engine, then the route opens."""
        started, desired = time.monotonic(), order.desired
        context = self._context(desired)
        async with beating(detail=f"version {desired.version}"):
            await self._engine.wait_ready(ENGINE_READY_S)
            await self._engine.resume_memory()
            served = await self._replica.serve(
                ServeRequest(
                    run=context.run,
                    version=desired.version,
                    candidate_ref=desired.candidate_ref,
                    engine_url=self._engine_url,
                )
            )
            incarnation = await self._engine.incarnation()
            replica = await self._replica.status()
        route = await self._route(desired, incarnation)
        try:
            await set_route(self._services.redis, route)
        except RouteOvertaken as error:
            raise obsolete(error) from error
        return CellReport(
            engine=incarnation,
            replica=replica.incarnation,
            checksum=served.checksum,
            source=served.came_by,
            seconds=time.monotonic() - started,
        )

    @activity.defn(name="prepare_training")
    async def prepare_training(self, order: CellOrder) -> CellReport:
        """Free the engine's memory, bring the replica to the step's version; the core with optimizer state."""
        started, desired = time.monotonic(), order.desired
        context = self._context(desired)
        running = await demand.running_episodes(self._services.redis, context.run)
        async with beating(detail=f"step {desired.step}"):
            incarnation = await self._release_engine()
            prepared = await self._replica.prepare(
                PrepareRequest(
                    run=context.run,
                    version=desired.version,
                    candidate_ref=desired.candidate_ref,
                    as_core=desired.core,
                    optimizer=OptimizerConfig(**context.optimizer.model_dump()),
                    loss=LossConfig(**context.loss.model_dump()),
                    fence=desired.fence,
                )
            )
            replica = await self._replica.status()
        return CellReport(
            engine=incarnation,
            replica=replica.incarnation,
            source=prepared.came_by,
            seconds=time.monotonic() - started,
            running=running,
        )

    @activity.defn(name="watch_cell")
    async def watch_cell(self, watch: WatchCellInput) -> CellReport:
        """Return when the engine or the replica is another process than the one that was prepared."""
        silent = 0
        async with beating():
            while True:
                try:
                    engine = await self._engine.incarnation()
                    replica = (await self._replica.status()).incarnation
                    silent = 0
                except (EngineError, ReplicaUnavailable, TimeoutError):
                    silent += 1
                    engine, replica = watch.engine, watch.replica
                if (engine, replica) != (watch.engine, watch.replica) or silent >= MISSED:
                    return CellReport(engine=engine, replica=replica)
                await asyncio.sleep(WATCH_S)

    async def _release_engine(self) -> str:
        """A dead engine has nothing to release: training goes on without it."""
        try:
            await self._engine.release_memory()
            return await self._engine.incarnation()
        except EngineError as error:
            activity.logger.warning("%s: the engine releases nothing: %s", self._cell, error)
            return ""

    async def _route(self, desired: Desired, incarnation: str) -> keys.Route:
        return keys.Route(
            cell=self._cell,
            url=self._engine_url,
            incarnation=incarnation,
            epoch=desired.epoch,
            open=True,
            version=desired.version,
        )

    @staticmethod
    def _context(desired: Desired) -> RunContext:
        if desired.context is None:
            raise ApplicationError("a cell needs the context of a run to serve or train", non_retryable=True)
        return desired.context
