"""Training activities in a cell's worker: claims, the satellite's offer, the core's update.

Each names the incarnation that it is for. A replica that was replaced has lost its gradient sum: the order fails
with the type `Lost`, is not retried, and the step has the work done again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import orjson
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.beating import beating
from activities.presence import Presence
from activities.services import Services
from infra.megatron.protocol import (
    FinishRequest,
    GradientsRequest,
    PublishedSum,
    PublishRequest,
    ReplicaClient,
    ReplicaError,
    ReplicaUnavailable,
    TrainRequest,
)
from infra.transfer.manifest import TransferManifest
from trajectory.additive import add_all
from workflows.activity_calls import LOST, SUMS_LOST
from workflows.contracts.orders import Candidate, FinishInput, GradientsInput, GradientSum, TrainInput, TrainResult

Answer = TypeVar("Answer")


class TrainingActivities:
    def __init__(self, services: Services, cell: str) -> None:
        self._blobs = services.blobs
        self._replica = ReplicaClient(services.settings.replica_socket(cell))
        self._presence = Presence(self._replica)

    @activity.defn(name="train_micro_steps")
    async def train_micro_steps(self, order: TrainInput) -> TrainResult:
        async with beating(detail=f"{len(order.micro_steps)} micro-steps"):
            await self._fence(order.incarnation)
            train = TrainRequest(
                run=order.run, step=order.step, version=order.version, micro_steps=tuple(order.micro_steps)
            )
            trained = await self._answer(self._replica.train(train))
        return TrainResult(
            seconds=trained.seconds,
            stats=scalars(trained.stats.values()),
            stats_ref=self._blobs.put(orjson.dumps(trained.stats)),
        )

    @activity.defn(name="offer_gradients")
    async def offer_gradients(self, order: GradientsInput) -> GradientSum:
        async with beating():
            await self._fence(order.incarnation)
            offered = await self._answer(self._replica.gradients(GradientsRequest(run=order.run, step=order.step)))
        return GradientSum(
            cell=order.cell,
            incarnation=offered.incarnation,
            micro_steps=list(offered.ids),
            manifest_ref=self._blobs.put(offered.manifest.model_dump_json().encode()),
        )

    @activity.defn(name="finish_step")
    async def finish_step(self, order: FinishInput) -> Candidate:
        """Add the satellites' sums, update once, store the candidate, and offer the new weights to the others."""
        async with beating(detail=f"version {order.version + 1}"):
            await self._fence(order.incarnation)
            satellites = [
                PublishedSum(
                    incarnation=offer.incarnation,
                    ids=tuple(offer.micro_steps),
                    manifest=TransferManifest.model_validate_json(self._blobs.get(offer.manifest_ref)),
                )
                for offer in order.satellites
            ]
            finish = FinishRequest(
                run=order.run,
                step=order.step,
                version=order.version,
                normaliser=order.normaliser,
                micro_steps=tuple(order.micro_steps),
                satellites=tuple(satellites),
                record_gradient=order.record_gradient,
            )
            finished = await self._answer(self._replica.finish(finish))
            await self._answer(self._replica.publish(PublishRequest(run=order.run, version=finished.version)))
        return Candidate(
            ref=finished.candidate_ref,
            version=finished.version,
            grad_norm=finished.grad_norm,
            checksum=finished.checksum,
        )

    async def _answer(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        return await _or_lost(self._presence.while_answering(call))

    async def _fence(self, incarnation: str) -> None:
        status = await _or_lost(self._replica.status())
        if status.incarnation != incarnation:
            raise ApplicationError(
                f"the order is for replica {incarnation}, but {status.incarnation} is here", type=LOST
            )


def scalars(stats: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The loss statistics of several micro-steps, without the histograms."""
    total = add_all(stats)
    return {name: float(value) for name, value in total.items() if not isinstance(value, Mapping)}


async def _or_lost(call: Awaitable[Answer]) -> Answer:
    """A replica that refuses has lost what the order is about; one that is away may come back."""
    try:
        return await call
    except ReplicaUnavailable as error:
        raise ApplicationError(str(error), type="ReplicaUnavailable") from error
    except ReplicaError as error:
        if error.problem.lost:
            raise ApplicationError(str(error), *error.problem.lost, type=SUMS_LOST) from error
        raise ApplicationError(str(error), type=LOST) from error
