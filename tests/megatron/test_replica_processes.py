"""Two replica processes share a step over Mooncake; one may be killed at any time."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from redis.asyncio import Redis

from infra.megatron import protocol as p
from infra.megatron.checkpoint import get_tensors, initial_candidate, load_candidate, load_optimizer, load_weights
from infra.megatron.replay import recompute_gradient
from infra.megatron.replica import Replica
from infra.state import keys
from infra.state.blobs import BlobStore
from trajectory.config import LossConfig, OptimizerConfig
from trajectory.micro_step import MicroStep
from workflows.contracts.orders import (
    Candidate,
    CellOrder,
    CellReport,
    Desired,
    FinishInput,
    GradientsInput,
    GradientSum,
    RunContext,
    TrainInput,
    TrainResult,
)

pytestmark = pytest.mark.stack

Clients = tuple[p.ReplicaClient, p.ReplicaClient]
PutMicroSteps = Callable[[BlobStore, int, int], tuple[str, ...]]
ADAMW = OptimizerConfig(lr=1e-3)


def prepare_order(run: str, version: int, ref: str, *, as_core: bool, fence: str = "") -> CellOrder:
    context = RunContext(run=run, policy="policy", optimizer=ADAMW, loss=LossConfig())
    desired = Desired(
        epoch=1, role="train", version=version, candidate_ref=ref, core=as_core, context=context, fence=fence
    )
    return CellOrder(cell="cell", desired=desired)


async def prepare(client: p.ReplicaClient, run: str, version: int, ref: str, *, as_core: bool) -> CellReport:
    return await client.prepare(prepare_order(run, version, ref, as_core=as_core))


async def to(client: p.ReplicaClient, run: str, step: int) -> dict[str, Any]:
    """What every order to the incarnation that is there begins with."""
    return {"cell": "cell", "incarnation": (await client.status()).incarnation, "run": run, "step": step}


async def train(client: p.ReplicaClient, run: str, step: int, version: int, refs: Sequence[str]) -> TrainResult:
    return await client.train(TrainInput(**await to(client, run, step), version=version, micro_steps=list(refs)))


async def gradients(client: p.ReplicaClient, run: str, step: int) -> GradientSum:
    return await client.gradients(GradientsInput(**await to(client, run, step)))


async def finish(
    client: p.ReplicaClient,
    run: str,
    step: int,
    version: int,
    refs: Sequence[str],
    *satellites: GradientSum,
    record: bool = False,
) -> Candidate:
    order = FinishInput(
        **await to(client, run, step),
        version=version,
        normaliser=8,
        micro_steps=list(refs),
        satellites=list(satellites),
        record_gradient=record,
    )
    return await client.finish(order)


def on_one_replica(blobs: BlobStore, base_ref: str, refs: tuple[str, ...], policy: Path) -> Replica:
    base = load_candidate(blobs, base_ref)
    replica = Replica(policy, ADAMW)
    replica.load(load_weights(blobs, base), base.version)
    replica.load_optimizer(load_optimizer(blobs, base))
    replica.begin(0)
    for ref in refs:
        replica.train(MicroStep.from_bytes(blobs.get(ref)))
    return replica


def distance(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - two[name]).norm() / one[name].norm().clamp(min=1e-12)) for name in one)


async def test_a_step_shared_by_two_processes_is_the_step_of_one(
    cells: Any, clients: Clients, put_micro_steps: PutMicroSteps, policy_dir: Path
) -> None:
    core, satellite = clients
    run, blobs = "shared", cells.blobs
    base = initial_candidate(blobs, run, policy_dir)
    refs = put_micro_steps(blobs, 5, 1)

    assert (await prepare(core, run, 0, base, as_core=True)).source == "blob"
    published = await core.publish(p.PublishRequest(run=run, version=0))
    assert (await prepare(satellite, run, 0, base, as_core=False)).source == "transfer"
    assert (await prepare(satellite, run, 0, base, as_core=False)).source == "resident"
    assert published.checksum == load_candidate(blobs, base).checksum

    first, second = await asyncio.gather(
        train(core, run, 0, 0, (refs[4], refs[0])), train(satellite, run, 0, 0, refs[1:4])
    )
    again = await train(satellite, run, 0, 0, (refs[2], refs[1]))
    details = json.loads(blobs.get(second.stats_ref))
    assert json.loads(blobs.get(again.stats_ref)) == {ref: details[ref] for ref in (refs[2], refs[1])}
    assert again.stats["targets"] == sum(details[ref]["targets"] for ref in (refs[2], refs[1]))
    assert (await satellite.status()).done == refs[1:4]
    assert (
        json.loads(blobs.get(first.stats_ref))[refs[0]]["targets"] == MicroStep.from_bytes(blobs.get(refs[0])).targets
    )

    contribution = await gradients(satellite, run, 0)
    finished = await finish(core, run, 0, 0, refs, contribution, record=True)
    assert finished == await finish(core, run, 0, 0, refs, contribution, record=True)
    manifest = load_candidate(blobs, finished.ref)
    assert manifest.claims == {published.replica: (refs[4], refs[0]), contribution.incarnation: refs[1:4]}
    assert (manifest.version, manifest.base_ref, manifest.micro_steps) == (1, base, refs)

    alone = on_one_replica(blobs, base, refs, policy_dir)
    assert manifest.gradient_ref is not None
    assert distance(alone.gradient(), get_tensors(blobs, manifest.gradient_ref)) < 1e-5
    assert alone.update(8) == pytest.approx(finished.grad_norm, rel=1e-5)
    replayed = recompute_gradient(finished.ref, blobs, policy_dir)
    assert replayed.difference < 1e-5 and max(replayed.per_tensor.values()) < 1e-4
    assert (replayed.normaliser, replayed.micro_steps) == (8, 5)

    assert (await core.status()).version == 1
    await core.publish(p.PublishRequest(run=run, version=1))
    moved = await prepare(satellite, run, 1, finished.ref, as_core=True)
    status = await satellite.status()
    assert (moved.source, status.version, status.optimizer_version) == ("transfer", 1, 1)
    assert status.done == refs[1:4], "its sum is kept until another step begins"


async def test_a_killed_satellites_micro_steps_are_missed_and_trained_again_by_the_core(
    cells: Any, clients: Clients, put_micro_steps: PutMicroSteps, policy_dir: Path
) -> None:
    core, satellite = clients
    run, blobs = "killed", cells.blobs
    base = initial_candidate(blobs, run, policy_dir)
    refs = put_micro_steps(blobs, 4, 2)
    await prepare(core, run, 0, base, as_core=True)
    await prepare(satellite, run, 0, base, as_core=False)
    await train(core, run, 0, 0, refs[:2])
    await train(satellite, run, 0, 0, refs[2:])
    contribution = await gradients(satellite, run, 0)
    cells.end("cell-1")

    with pytest.raises(p.ReplicaUnavailable):
        await satellite.status()
    with pytest.raises(p.ReplicaError) as lost:
        await finish(core, run, 0, 0, refs, contribution)
    assert (lost.value.status, lost.value.problem.lost) == (424, (contribution.incarnation,))
    with pytest.raises(p.ReplicaError) as missed:
        await finish(core, run, 0, 0, refs)
    assert (missed.value.status, missed.value.problem.missing) == (409, refs[2:])
    await train(core, run, 0, 0, refs)
    with pytest.raises(p.ReplicaError) as doubled:
        await finish(core, run, 0, 0, refs, contribution)
    assert (doubled.value.status, set(doubled.value.problem.doubled)) == (409, set(refs[2:]))

    finished = await finish(core, run, 0, 0, refs)
    alone = on_one_replica(blobs, base, refs, policy_dir)
    alone.update(8)
    made = load_weights(blobs, load_candidate(blobs, finished.ref))
    assert distance(alone.weights(), made) < 1e-5
    with pytest.raises(p.ReplicaError, match="finished here"):
        await train(core, run, 0, 1, refs)


async def test_a_fenced_incarnation_forgets_its_sum_and_goes_on_as_another(
    cells: Any, clients: Clients, put_micro_steps: PutMicroSteps, policy_dir: Path
) -> None:
    core, fenced = clients
    run, blobs = "fenced", cells.blobs
    base = initial_candidate(blobs, run, policy_dir)
    refs = put_micro_steps(blobs, 3, 8)
    await prepare(core, run, 0, base, as_core=True)
    await prepare(fenced, run, 0, base, as_core=False)
    await train(core, run, 0, 0, refs[:1])
    await train(fenced, run, 0, 0, refs[1:])
    offered = await gradients(fenced, run, 0)

    fence = prepare_order(run, 0, base, as_core=False, fence=offered.incarnation)
    assert (await fenced.prepare(fence)).source == "resident"
    again = await fenced.status()
    assert again.incarnation != offered.incarnation and again.done == ()
    with pytest.raises(p.ReplicaError) as lost:
        await finish(core, run, 0, 0, refs, offered)
    assert lost.value.problem.lost == (offered.incarnation,)

    await train(fenced, run, 0, 0, refs[2:])
    await fenced.prepare(fence)
    assert (await fenced.status()).done == refs[2:], "a repeated fence is for the old incarnation only"
    await train(core, run, 0, 0, refs[1:2])
    second = await gradients(fenced, run, 0)
    finished = await finish(core, run, 0, 0, refs, second)
    alone = on_one_replica(blobs, base, refs, policy_dir)
    assert alone.update(8) == pytest.approx(finished.grad_norm, rel=1e-5)


async def test_what_does_not_fit_what_is_held_is_refused(
    cells: Any, clients: Clients, put_micro_steps: PutMicroSteps, policy_dir: Path
) -> None:
    core, _ = clients
    run, blobs = "refusals", cells.blobs
    base = initial_candidate(blobs, run, policy_dir)
    refs = put_micro_steps(blobs, 2, 3)
    await prepare(core, run, 0, base, as_core=False)
    elsewhere = TrainInput(**await to(core, run, 0) | {"incarnation": "i"}, version=0, micro_steps=list(refs))
    for request, reason in (
        (core.train(elsewhere), "for replica i, but"),
        (prepare(core, "another", 0, base, as_core=True), "of run refusals"),
        (train(core, run, 0, 1, refs), "not version 1"),
        (gradients(core, run, 0), "no gradient sum"),
        (finish(core, run, 0, 0, refs), "not prepared as core"),
        (train(core, run, 0, 0, ("sha256:" + "0" * 64,)), "no blob"),
    ):
        with pytest.raises(p.ReplicaError, match=reason) as refusal:
            await request
        assert refusal.value.status == 409
    await train(core, run, 5, 0, refs[:1])
    with pytest.raises(p.ReplicaError, match="step 5 has begun"):
        await train(core, run, 4, 0, refs)
    assert (await core.status()).done == refs[:1]


async def test_a_step_without_micro_steps_makes_a_version_with_the_same_weights(
    cells: Any, clients: Clients, policy_dir: Path
) -> None:
    core, _ = clients
    run = "idle"
    base = initial_candidate(cells.blobs, run, policy_dir)
    await prepare(core, run, 0, base, as_core=True)
    finished = await finish(core, run, 0, 0, ())
    manifest = load_candidate(cells.blobs, finished.ref)
    assert (finished.version, finished.grad_norm) == (1, 0.0)
    assert manifest.checksum == load_candidate(cells.blobs, base).checksum
    assert manifest.optimizer_ref is None


async def test_a_candidate_that_could_not_be_stored_is_stored_by_the_next_finish(
    cells: Any, clients: Clients, put_micro_steps: PutMicroSteps, policy_dir: Path
) -> None:
    core, _ = clients
    run, blobs = "stored-later", cells.blobs
    base = initial_candidate(blobs, run, policy_dir)
    refs = put_micro_steps(blobs, 2, 6)
    await prepare(core, run, 0, base, as_core=True)
    await train(core, run, 0, 0, refs)
    store, away = cells.home / "blobs" / "sha256", cells.home / "blobs" / "away"
    store.rename(away)
    store.write_text("not a folder")
    with pytest.raises(p.ReplicaUnavailable, match="could not be stored"):
        await gradients(core, run, 0)
    with pytest.raises(p.ReplicaError) as failed:
        await finish(core, run, 0, 0, refs)
    assert failed.value.status == 500
    store.unlink()
    away.rename(store)

    finished = await finish(core, run, 0, 0, refs)
    alone = on_one_replica(blobs, base, refs, policy_dir)
    assert alone.update(8) == pytest.approx(finished.grad_norm, rel=1e-5)
    assert (await core.status()).version == 1


async def test_weights_of_a_dead_source_or_another_candidate_come_from_the_blob_store(
    cells: Any, clients: Clients, put_micro_steps: PutMicroSteps, policy_dir: Path, valkey_url: str
) -> None:
    core, other = clients
    run, blobs = "sources", cells.blobs
    base = initial_candidate(blobs, run, policy_dir)
    refs = put_micro_steps(blobs, 2, 4)
    candidates = []
    for client, chosen in ((core, refs[:1]), (other, refs[1:])):  # two candidates that both claim version 1
        await prepare(client, run, 0, base, as_core=True)
        await train(client, run, 0, 0, chosen)
        candidates.append((await finish(client, run, 0, 0, chosen)).ref)
    await other.publish(p.PublishRequest(run=run, version=1))
    await prepare(core, run, 0, base, as_core=False)
    assert (await prepare(core, run, 1, candidates[0], as_core=False)).source == "blob"
    assert (await prepare(core, run, 1, candidates[1], as_core=False)).source == "transfer"

    cells.end("cell-1")
    async with Redis.from_url(valkey_url) as redis:
        assert await redis.hlen(keys.weights(run, 1)) == 1, "the dead source is still listed"
    await prepare(core, run, 0, base, as_core=False)
    assert (await prepare(core, run, 1, candidates[1], as_core=False)).source == "blob"


async def test_status_answers_during_training_and_sigterm_does_not_wait_for_it(
    cells: Any, clients: Clients, put_long_micro_step: Callable[[BlobStore], str], policy_dir: Path
) -> None:
    _, replica = clients
    run, blobs = "busy", cells.blobs
    base = initial_candidate(blobs, run, policy_dir)
    await prepare(replica, run, 0, base, as_core=False)
    training = asyncio.create_task(train(replica, run, 0, 0, (put_long_micro_step(blobs),)))
    async with asyncio.timeout(20), cells.client("cell-1") as asking:
        while (await asking.status()).busy != "train":
            assert not training.done()
    assert cells.end("cell-1", signal.SIGTERM) == -signal.SIGTERM
    with pytest.raises(p.ReplicaUnavailable):
        await training
