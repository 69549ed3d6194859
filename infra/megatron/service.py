"""What a replica's process does for each request: the gradient ledger of an incarnation.

Invariants. Within an incarnation a micro-step is trained at most once per step, and what is asked again is answered
again. The core accepts sums only if their sets of micro-steps, its own included, are disjoint and together exactly the
step's; until all are read and checked nothing is added. Weights are identified by their candidate's checksum, not by
a version number: two candidates may claim the same version. A step's gradient sum is dropped only when another step
begins, never by a change of weights.

Requests that change something run one after another; torch runs on a thread of its own, so ``status`` always answers.
Knows nothing of HTTP (``infra.megatron.server``) or of how gradients are computed (``infra.megatron.replica``).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import orjson
from redis.asyncio import Redis
from torch import Tensor

from infra.megatron.checkpoint import (
    CandidateFacts,
    CandidateManifest,
    load_candidate,
    load_optimizer,
    load_weights,
    save_candidate,
)
from infra.megatron.coverage import check_coverage
from infra.megatron.protocol import Problem, PublishRequest, ReplicaError, Status
from infra.megatron.replica import Replica
from infra.sglang.client import EngineClient
from infra.state import keys
from infra.state.blobs import BlobMissing, BlobStore
from infra.state.redis import text
from infra.transfer.endpoint import TensorPublisher, pull
from infra.transfer.manifest import TransferManifest, checksum
from infra.transfer.mooncake import MooncakeEndpoint, TransferError
from trajectory.additive import add_all
from trajectory.micro_step import MicroStep
from workflows.contracts.orders import (
    Candidate,
    CellOrder,
    CellReport,
    Desired,
    FinishInput,
    GradientsInput,
    GradientSum,
    ReplicaOrder,
    ServeOrder,
    TrainInput,
    TrainResult,
)

logger = logging.getLogger(__name__)

PULL_DEADLINE_S: Final = 60.0
"""Seconds for one source of weights or of a gradient sum."""

MANIFEST_TTL_S: Final = 3600
"""Seconds after which published weights are forgotten unless published again."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Held:
    """The weights in the replica."""

    run: str
    version: int
    checksum: str
    candidate_ref: str


@dataclass
class StepSum:
    """The step whose gradient sum is in the replica."""

    run: str
    step: int
    version: int
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Micro-step -> its loss statistics, in the order in which they were trained."""
    published: GradientSum | None = None


@dataclass(frozen=True)
class Update:
    """An optimizer update that this incarnation made, and the answer once its candidate is in the blob store."""

    facts: CandidateFacts
    gradient: dict[str, Tensor] | None
    answer: Candidate | None = None


@dataclass(frozen=True)
class PublishedWeights:
    """Weights that others can read from this process."""

    name: str
    of: Held
    manifest: TransferManifest


class ReplicaService:
    """One incarnation at a time. ``torch_thread`` is the single thread on which the replica was built."""

    def __init__(
        self, replica: Replica, torch_thread: ThreadPoolExecutor, blobs: BlobStore, redis: Redis, host: str
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self._replica, self._torch_thread, self._blobs, self._redis = replica, torch_thread, blobs, redis
        self._endpoint = MooncakeEndpoint(host)
        self._publisher = TensorPublisher(self._endpoint)
        self._lock = asyncio.Lock()
        self._busy: str | None = None
        self._held: Held | None = None
        self._optimizer: Held | None = None  # the weights whose optimizer state is held
        self._open: StepSum | None = None
        self._update: Update | None = None
        self._source: PublishedWeights | None = None
        self._resident_bytes = replica.resident_bytes()

    async def status(self) -> Status:
        held, optimizer, opened = self._held, self._optimizer, self._open
        return Status(
            incarnation=self.incarnation,
            run=held.run if held else None,
            version=held.version if held else -1,
            optimizer_version=optimizer.version if optimizer else -1,
            step=opened.step if opened else None,
            done=tuple(opened.done) if opened else (),
            resident_bytes=self._resident_bytes,
            busy=self._busy,
        )

    async def prepare(self, order: CellOrder) -> CellReport:
        desired = order.desired
        context = desired.of_run
        async with self._alone("prepare") as started:
            if desired.fence == self.incarnation:
                await self._begin_anew()
            opened = self._open
            if opened and opened.run == context.run and opened.done and self._replica.loss != context.loss:
                raise _refused(f"the gradient sum of step {opened.step} was begun with another loss")
            if self._replica.optimizer != context.optimizer:
                self._optimizer = None
            await self._torch(self._replica.configure, context.optimizer, context.loss)
            held, source = await self._hold(desired)
            if desired.core and self._optimizer != held:
                manifest = await self._candidate(desired)
                state = await asyncio.to_thread(load_optimizer, self._blobs, manifest)
                await self._torch(self._replica.load_optimizer, state)
                self._optimizer = held
            return self._report(held.checksum, started, source)

    async def train(self, order: TrainInput) -> TrainResult:
        async with self._alone("train", order) as started:
            self._require_held(order.run, order.version)
            opened = await self._open_step(order.run, order.step, order.version)
            for ref in order.micro_steps:
                if ref in opened.done:
                    continue
                await self._withdraw_sum()  # what others may read is no longer this replica's sum
                micro_step = MicroStep.from_bytes(await asyncio.to_thread(self._blobs.get, ref))
                try:
                    opened.done[ref] = await self._torch(self._replica.train, micro_step)
                finally:
                    if self._replica.step is None:  # a backward pass failed half way: the whole sum is lost
                        self._open = None
            stats = {ref: opened.done[ref] for ref in order.micro_steps}
            seconds = time.monotonic() - started
            numbers = {name: n for name, n in add_all(stats.values()).items() if not isinstance(n, dict)}
            return TrainResult(seconds=seconds, stats=numbers, stats_ref=await self._store(orjson.dumps(stats)))

    async def gradients(self, order: GradientsInput) -> GradientSum:
        async with self._alone("gradients", order):
            opened = self._open
            if opened is None or (opened.run, opened.step) != (order.run, order.step):
                raise _refused(f"no gradient sum of step {order.step} of run {order.run} is held")
            if opened.published is None:
                gradient = await self._torch(self._replica.gradient)
                manifest = await asyncio.to_thread(self._publisher.publish, _sum_name(opened), gradient)
                opened.published = GradientSum(
                    cell=order.cell,
                    incarnation=self.incarnation,
                    micro_steps=list(opened.done),
                    manifest_ref=await self._store(manifest.model_dump_json().encode()),
                )
            return opened.published

    async def finish(self, order: FinishInput) -> Candidate:
        async with self._alone("finish", order):
            made = self._update
            if made is None or (made.facts.run, made.facts.step) != (order.run, order.step):
                made = await self._make_update(order)
            return made.answer or await self._save(made)

    async def publish(self, request: PublishRequest) -> CellReport:
        async with self._alone("publish") as started:
            held = self._require_held(request.run, request.version)
            before = self._source
            if before is not None and before.of != held:
                await self._withdraw_weights(before)
                before = None
            if before is None:
                name = f"weights/{held.run}/{held.version}"
                weights = await self._torch(self._replica.weights)
                manifest = await asyncio.to_thread(self._publisher.publish, name, weights)
                self._source = before = PublishedWeights(name, held, manifest)
            key = keys.weights(held.run, held.version)
            await self._redis.hset(key, self.incarnation, before.manifest.model_dump_json())
            await self._redis.expire(key, MANIFEST_TTL_S)
            return self._report(held.checksum, started)

    async def serve(self, order: ServeOrder) -> CellReport:
        async with self._alone("serve") as started:
            _, source = await self._hold(order.desired)
            weights = await self._torch(self._replica.weights)
            shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
            engine = EngineClient(order.engine_url, vocab_size=self._replica.shape.vocab, weight_shapes=shapes)
            try:
                digest = await engine.update_weights(weights, order.desired.version)
            finally:
                await engine.close()
            return self._report(digest, started, source)

    async def close(self) -> None:
        """Withdraw the weights that this process offers to others."""
        if self._source is not None:
            await self._withdraw_weights(self._source)

    async def _begin_anew(self) -> None:
        """Become another incarnation: nothing of what this one summed may ever be accepted."""
        if self._source is not None:
            await self._withdraw_weights(self._source)
        await self._withdraw_sum()
        await self._torch(self._replica.zero)
        self._open = self._update = None
        logger.warning("incarnation %s was declared lost and is fenced", self.incarnation)
        self.incarnation = uuid.uuid4().hex

    async def _withdraw_weights(self, source: PublishedWeights) -> None:
        await self._redis.hdel(keys.weights(source.of.run, source.of.version), self.incarnation)
        self._source = None
        await asyncio.to_thread(self._publisher.withdraw, source.name)

    async def _hold(self, desired: Desired) -> tuple[Held, str]:
        """Make the held weights those of a candidate, whatever they are now; gradient sums stay.

        Also returns how they came (`CellReport.source`).
        """
        manifest = await self._candidate(desired)
        run, version, source = desired.of_run.run, desired.version, "resident"
        if self._held is None or self._held.checksum != manifest.checksum:
            weights = await self._from_peers(run, version, manifest.checksum)
            source = "transfer" if weights is not None else "blob"
            if weights is None:
                weights = await asyncio.to_thread(load_weights, self._blobs, manifest)
            self._held = None  # until the next line has succeeded it is neither
            if self._update is not None and self._update.answer is None:
                self._update = None  # never saved, and now its weights go: its step may begin anew
            await self._torch(self._replica.load, weights, version)
        self._replica.version = version  # the same weights may be two versions: an update without a gradient
        self._held = Held(run, version, manifest.checksum, desired.candidate_ref)
        return self._held, source

    async def _candidate(self, desired: Desired) -> CandidateManifest:
        run, version, ref = desired.of_run.run, desired.version, desired.candidate_ref
        manifest = await asyncio.to_thread(load_candidate, self._blobs, ref)
        if (manifest.run, manifest.version) != (run, version):
            raise _refused(
                f"candidate {ref} is version {manifest.version} of run {manifest.run}, not {version} of {run}"
            )
        return manifest

    async def _from_peers(self, run: str, version: int, expected: str) -> dict[str, Tensor] | None:
        """Weights from any process that published them (also this one, if it has loaded others since); None when none
        has them as the candidate says."""
        sources = await self._redis.hgetall(keys.weights(run, version))
        for name, described in sources.items():
            source, manifest = text(name), TransferManifest.model_validate_json(described)
            try:
                weights = await asyncio.to_thread(pull, self._endpoint, manifest, deadline_s=PULL_DEADLINE_S)
            except TransferError as error:
                logger.warning("weights of version %d of run %s not read from %s: %s", version, run, source, error)
                continue
            if checksum(weights) == expected:
                return weights
            logger.warning("weights of version %d of run %s at %s are another candidate's", version, run, source)
        return None

    def _require_held(self, run: str, version: int) -> Held:
        held = self._held
        if held is None or (held.run, held.version) != (run, version):
            what = f"version {held.version} of run {held.run}" if held else "no version"
            raise _refused(f"holds {what}, not version {version} of run {run}")
        return held

    async def _open_step(self, run: str, step: int, version: int) -> StepSum:
        """The step's ledger, begun with a zero sum when it is new."""
        opened = self._open
        last = self._update.facts if self._update else None
        if last is not None and last.run == run and step <= last.step:
            raise _refused(f"step {step} of run {run}: step {last.step} is finished here")
        if opened is not None and opened.run == run and step < opened.step:
            raise _refused(f"step {step} of run {run}: step {opened.step} has begun here")
        if opened is not None and (opened.run, opened.step) == (run, step):
            if opened.version != version:
                raise _refused(f"step {step} was begun at version {opened.version}, not {version}")
            return opened
        await self._withdraw_sum()
        await self._torch(self._replica.begin, step)
        self._open = StepSum(run, step, version)
        return self._open

    async def _withdraw_sum(self) -> None:
        if self._open is not None and self._open.published is not None:
            await asyncio.to_thread(self._publisher.withdraw, _sum_name(self._open))
            self._open.published = None

    async def _make_update(self, order: FinishInput) -> Update:
        base = self._require_held(order.run, order.version)
        if self._optimizer != base:
            raise _refused(f"not prepared as core: the optimizer state of version {order.version} is not held")
        opened = await self._open_step(order.run, order.step, order.version)
        satellites = sorted(order.satellites, key=lambda satellite: satellite.incarnation)
        claims = {satellite.incarnation: tuple(satellite.micro_steps) for satellite in satellites}
        if len(claims) < len(satellites) or self.incarnation in claims:
            raise _refused("an incarnation gives more than one sum")
        claims[self.incarnation] = tuple(opened.done)
        check_coverage(order.micro_steps, claims)
        sums = [await self._pull_sum(satellite) for satellite in satellites]
        try:
            norm, gradient = await self._torch(self._replica.combine, sums, order.normaliser, order.record_gradient)
        finally:
            if self._replica.step is None:  # the sum has become the update, or was spoilt
                self._open = None
        facts = CandidateFacts(
            run=order.run,
            step=order.step,
            version=order.version + 1,
            base_version=order.version,
            base_ref=base.candidate_ref,
            micro_steps=tuple(order.micro_steps),
            claims=claims,
            normaliser=order.normaliser,
            grad_norm=norm,
            optimizer=self._replica.optimizer,
            loss=self._replica.loss,
        )
        self._held = self._optimizer = None  # the new version has no name until its candidate is saved
        self._update = Update(facts, gradient)
        return self._update

    async def _pull_sum(self, satellite: GradientSum) -> dict[str, Tensor]:
        try:
            manifest = TransferManifest.model_validate_json(
                await asyncio.to_thread(self._blobs.get, satellite.manifest_ref)
            )
            return await asyncio.to_thread(pull, self._endpoint, manifest, deadline_s=PULL_DEADLINE_S)
        except (BlobMissing, TransferError) as error:
            detail = f"the gradient sum of incarnation {satellite.incarnation} could not be read: {error}"
            raise ReplicaError(Problem(detail=detail, lost=(satellite.incarnation,)), status=424) from error

    async def _save(self, made: Update) -> Candidate:
        """Put the candidate of an update; when that fails the update stays, and the next ``finish`` tries again."""
        facts = made.facts
        weights = await self._torch(self._replica.weights)
        state = await self._torch(self._replica.optimizer_tensors)
        ref = await asyncio.to_thread(save_candidate, self._blobs, facts, weights, state, made.gradient)
        digest = checksum(weights)
        self._held = self._optimizer = Held(facts.run, facts.version, digest, ref)
        answer = Candidate(ref=ref, version=facts.version, grad_norm=facts.grad_norm, checksum=digest)
        self._update = replace(made, gradient=None, answer=answer)
        return answer

    def _report(self, checksum: str, started: float, source: str = "") -> CellReport:
        seconds = time.monotonic() - started
        return CellReport(engine="", replica=self.incarnation, checksum=checksum, source=source, seconds=seconds)

    async def _store(self, data: bytes) -> str:
        """The reference of a blob. Raises the ReplicaError after which the order is given again."""
        try:
            return await asyncio.to_thread(self._blobs.put, data)
        except Exception as error:  # whatever the store raises: nothing of the sum is lost by it
            detail = f"the answer could not be stored: {type(error).__name__}: {error}"
            raise ReplicaError(Problem(detail=detail), status=503) from error

    @asynccontextmanager
    async def _alone(self, name: str, order: ReplicaOrder | None = None) -> AsyncIterator[float]:
        """Wait for the request that is being answered; yields the start of this one (monotonic seconds).

        An order to another incarnation is refused: what that one summed is not here.
        """
        async with self._lock:
            if order is not None and order.incarnation != self.incarnation:
                raise _refused(f"the order is for replica {order.incarnation}, but {self.incarnation} is here")
            self._busy = name
            try:
                yield time.monotonic()
            finally:
                self._busy = None
                self._resident_bytes = await self._torch(self._replica.resident_bytes)

    async def _torch(self, work: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work, *args)


def _refused(detail: str) -> ReplicaError:
    return ReplicaError(Problem(detail=detail))


def _sum_name(opened: StepSum) -> str:
    return f"gradient/{opened.run}/{opened.step}"
