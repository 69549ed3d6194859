"""Training activities in a cell's worker: claims, the satellite's offer, the core's update.

Each names the incarnation that it is for. A replica that was replaced has lost its gradient sum: the order fails
with the type `Lost`, is not retried, and the step has the work done again.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.beating import beating
from activities.presence import Presence
from activities.services import Services
from infra.megatron.protocol import PublishRequest, ReplicaClient, ReplicaError, ReplicaUnavailable
from workflows.activity_calls import LOST, SUMS_LOST
from workflows.contracts.orders import Candidate, FinishInput, GradientsInput, GradientSum, TrainInput, TrainResult

Answer = TypeVar("Answer")


class TrainingActivities:
    def __init__(self, services: Services, cell: str) -> None:
        self._replica = ReplicaClient(services.settings.replica_socket(cell))
        self._presence = Presence(self._replica)

    @activity.defn(name="train_micro_steps")
    async def train_micro_steps(self, order: TrainInput) -> TrainResult:
        async with beating(detail=f"{len(order.micro_steps)} micro-steps"):
            return await self._answer(self._replica.train(order))

    @activity.defn(name="offer_gradients")
    async def offer_gradients(self, order: GradientsInput) -> GradientSum:
        async with beating():
            return await self._answer(self._replica.gradients(order))

    @activity.defn(name="finish_step")
    async def finish_step(self, order: FinishInput) -> Candidate:
        """Add the satellites' sums, update once, store the candidate, and offer the new weights to the others."""
        async with beating(detail=f"version {order.version + 1}"):
            candidate = await self._answer(self._replica.finish(order))
            await self._answer(self._replica.publish(PublishRequest(run=order.run, version=candidate.version)))
            return candidate

    async def _answer(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """A replica that refuses has lost what the order is about; one that is away may come back."""
        try:
            return await self._presence.while_answering(call)
        except ReplicaUnavailable as error:
            raise ApplicationError(str(error), type="ReplicaUnavailable") from error
        except ReplicaError as error:
            if error.problem.lost:
                raise ApplicationError(str(error), *error.problem.lost, type=SUMS_LOST) from error
            raise ApplicationError(str(error), type=LOST) from error
