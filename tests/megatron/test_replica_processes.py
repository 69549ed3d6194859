"""Two replica processes share a step over Mooncake; one may be killed at any time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
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

pytestmark = pytest.mark.stack

Clients = tuple[p.ReplicaClient, p.ReplicaClient]
PutMicroSteps = Callable[[BlobStore, int, int], tuple[str, ...]]
ADAMW = OptimizerConfig(lr=1e-3)


def prepare(run: str, version: int, ref: str, *, as_core: bool) -> p.PrepareRequest:
    return p.PrepareRequest(
        run=run, version=version, as_core=as_core, optimizer=ADAMW, loss=LossConfig(), candidate_ref=ref
    )


def train(run: str, step: int, version: int, refs: tuple[str, ...]) -> p.TrainRequest:
    return p.TrainRequest(run=run, step=step, version=version, micro_steps=refs)


def finish(run: str, step: int, version: int, refs: tuple[str, ...], **more: Any) -> p.FinishRequest:
    return p.FinishRequest(run=run, step=step, version=version, normaliser=8, micro_steps=refs, **more)


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

    assert (await core.prepare(prepare(run, 0, base, as_core=True))).came_by == "blob"
    published = await core.publish(p.PublishRequest(run=run, version=0))
    assert (await satellite.prepare(prepare(run, 0, base, as_core=False))).came_by == "transfer"
    assert (await satellite.prepare(prepare(run, 0, base, as_core=False))).came_by == "resident"
    assert published.checksum == load_candidate(blobs, base).checksum

    first, second = await asyncio.gather(
        core.train(train(run, 0, 0, (refs[4], refs[0]))), satellite.train(train(run, 0, 0, refs[1:4]))
    )
    again = await satellite.train(train(run, 0, 0, (refs[2], refs[1])))
    assert again.stats == {ref: second.stats[ref] for ref in (refs[2], refs[1])}
    assert (await satellite.status()).done == refs[1:4]
    assert first.stats[refs[0]]["targets"] == MicroStep.from_bytes(blobs.get(refs[0])).targets

    contribution = await satellite.gradients(p.GradientsRequest(run=run, step=0))
    request = finish(run, 0, 0, refs, satellites=(contribution,), record_gradient=True)
    finished = await core.finish(request)
    assert finished == await core.finish(request)
    manifest = load_candidate(blobs, finished.candidate_ref)
    assert manifest.claims == {first.incarnation: (refs[4], refs[0]), second.incarnation: refs[1:4]}
    assert (manifest.version, manifest.base_ref, manifest.micro_steps) == (1, base, refs)

    alone = on_one_replica(blobs, base, refs, policy_dir)
    assert manifest.gradient_ref is not None
    assert distance(alone.gradient(), get_tensors(blobs, manifest.gradient_ref)) < 1e-5
    assert alone.update(8) == pytest.approx(finished.grad_norm, rel=1e-5)
    replayed = recompute_gradient(finished.candidate_ref, blobs, policy_dir)
    assert replayed.difference < 1e-5 and max(replayed.per_tensor.values()) < 1e-4
    assert (replayed.normaliser, replayed.micro_steps) == (8, 5)

    assert (await core.status()).version == 1
    await core.publish(p.PublishRequest(run=run, version=1))
    moved = await satellite.prepare(prepare(run, 1, finished.candidate_ref, as_core=True))
    status = await satellite.status()
    assert (moved.came_by, status.version, status.optimizer_version) == ("transfer", 1, 1)
    assert status.done == refs[1:4], "its sum is kept until another step begins"


async def test_a_killed_satellites_micro_steps_are_missed_and_trained_again_by_the_core(
    cells: Any, clients: Clients, put_micro_steps: PutMicroSteps, policy_dir: Path
) -> None:
    core, satellite = clients
    run, blobs = "killed", cells.blobs
    base = initial_candidate(blobs, run, policy_dir)
    refs = put_micro_steps(blobs, 4, 2)
    await core.prepare(prepare(run, 0, base, as_core=True))
    await satellite.prepare(prepare(run, 0, base, as_core=False))
    await core.train(train(run, 0, 0, refs[:2]))
    await satellite.train(train(run, 0, 0, refs[2:]))
    contribution = await satellite.gradients(p.GradientsRequest(run=run, step=0))
    cells.end("cell-1")

    with pytest.raises(p.ReplicaUnavailable):
        await satellite.status()
    with pytest.raises(p.ReplicaError) as lost:
        await core.finish(finish(run, 0, 0, refs, satellites=(contribution,)))
    assert (lost.value.status, lost.value.problem.lost) == (424, (contribution.incarnation,))
    with pytest.raises(p.ReplicaError) as missed:
        await core.finish(finish(run, 0, 0, refs))
    assert (missed.value.status, missed.value.problem.missing) == (409, refs[2:])
    await core.train(train(run, 0, 0, refs))
    with pytest.raises(p.ReplicaError) as doubled:
        await core.finish(finish(run, 0, 0, refs, satellites=(contribution,)))
    assert (doubled.value.status, set(doubled.value.problem.doubled)) == (409, set(refs[2:]))

    finished = await core.finish(finish(run, 0, 0, refs))
    alone = on_one_replica(blobs, base, refs, policy_dir)
    alone.update(8)
    made = load_weights(blobs, load_candidate(blobs, finished.candidate_ref))
    assert distance(alone.weights(), made) < 1e-5
    with pytest.raises(p.ReplicaError, match="finished here"):
        await core.train(train(run, 0, 1, refs))


async def test_a_fenced_incarnation_forgets_its_sum_and_goes_on_as_another(
    cells: Any, clients: Clients, put_micro_steps: PutMicroSteps, policy_dir: Path
) -> None:
    core, fenced = clients
    run, blobs = "fenced", cells.blobs
    base = initial_candidate(blobs, run, policy_dir)
    refs = put_micro_steps(blobs, 3, 8)
    await core.prepare(prepare(run, 0, base, as_core=True))
    await fenced.prepare(prepare(run, 0, base, as_core=False))
    await core.train(train(run, 0, 0, refs[:1]))
    await fenced.train(train(run, 0, 0, refs[1:]))
    offered = await fenced.gradients(p.GradientsRequest(run=run, step=0))

    fence = prepare(run, 0, base, as_core=False).model_copy(update={"fence": offered.incarnation})
    assert (await fenced.prepare(fence)).came_by == "resident"
    again = await fenced.status()
    assert again.incarnation != offered.incarnation and again.done == ()
    with pytest.raises(p.ReplicaError) as lost:
        await core.finish(finish(run, 0, 0, refs, satellites=(offered,)))
    assert lost.value.problem.lost == (offered.incarnation,)

    await fenced.train(train(run, 0, 0, refs[2:]))
    await fenced.prepare(fence)
    assert (await fenced.status()).done == refs[2:], "a repeated fence is for the old incarnation only"
    await core.train(train(run, 0, 0, refs[1:2]))
    second = await fenced.gradients(p.GradientsRequest(run=run, step=0))
    finished = await core.finish(finish(run, 0, 0, refs, satellites=(second,)))
    alone = on_one_replica(blobs, base, refs, policy_dir)
    assert alone.update(8) == pytest.approx(finished.grad_norm, rel=1e-5)


async def test_what_does_not_fit_what_is_held_is_refused(
    cells: Any, clients: Clients, put_micro_steps: PutMicroSteps, policy_dir: Path
) -> None:
    core, _ = clients
    run, blobs = "refusals", cells.blobs
    base = initial_candidate(blobs, run, policy_dir)
    refs = put_micro_steps(blobs, 2, 3)
    await core.prepare(prepare(run, 0, base, as_core=False))
    for request, reason in (
        (core.prepare(prepare("another", 0, base, as_core=True)), "of run refusals"),
        (core.train(train(run, 0, 1, refs)), "not version 1"),
        (core.gradients(p.GradientsRequest(run=run, step=0)), "no gradient sum"),
        (core.finish(finish(run, 0, 0, refs)), "not prepared as core"),
        (core.train(train(run, 0, 0, ("sha256:" + "0" * 64,))), "no blob"),
    ):
        with pytest.raises(p.ReplicaError, match=reason) as refusal:
            await request
        assert refusal.value.status == 409
    await core.train(train(run, 5, 0, refs[:1]))
    with pytest.raises(p.ReplicaError, match="step 5 has begun"):
        await core.train(train(run, 4, 0, refs))
    assert (await core.status()).done == refs[:1]


async def test_a_step_without_micro_steps_makes_a_version_with_the_same_weights(
    cells: Any, clients: Clients, policy_dir: Path
) -> None:
    core, _ = clients
    run = "idle"
    base = initial_candidate(cells.blobs, run, policy_dir)
    await core.prepare(prepare(run, 0, base, as_core=True))
    finished = await core.finish(finish(run, 0, 0, ()))
    manifest = load_candidate(cells.blobs, finished.candidate_ref)
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
    await core.prepare(prepare(run, 0, base, as_core=True))
    await core.train(train(run, 0, 0, refs))
    store, away = cells.home / "blobs" / "sha256", cells.home / "blobs" / "away"
    store.rename(away)
    store.write_text("not a folder")
    with pytest.raises(p.ReplicaError) as failed:
        await core.finish(finish(run, 0, 0, refs))
    assert failed.value.status == 500
    store.unlink()
    away.rename(store)

    finished = await core.finish(finish(run, 0, 0, refs))
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
        await client.prepare(prepare(run, 0, base, as_core=True))
        await client.train(train(run, 0, 0, chosen))
        candidates.append((await client.finish(finish(run, 0, 0, chosen))).candidate_ref)
    await other.publish(p.PublishRequest(run=run, version=1))
    await core.prepare(prepare(run, 0, base, as_core=False))
    assert (await core.prepare(prepare(run, 1, candidates[0], as_core=False))).came_by == "blob"
    assert (await core.prepare(prepare(run, 1, candidates[1], as_core=False))).came_by == "transfer"

    cells.end("cell-1")
    async with Redis.from_url(valkey_url) as redis:
        assert await redis.hlen(keys.weights(run, 1)) == 1, "the dead source is still listed"
    await core.prepare(prepare(run, 0, base, as_core=False))
    assert (await core.prepare(prepare(run, 1, candidates[1], as_core=False))).came_by == "blob"


async def test_status_answers_during_training_and_sigterm_does_not_wait_for_it(
    cells: Any, clients: Clients, put_long_micro_step: Callable[[BlobStore], str], policy_dir: Path
) -> None:
    _, replica = clients
    run, blobs = "busy", cells.blobs
    base = initial_candidate(blobs, run, policy_dir)
    await replica.prepare(prepare(run, 0, base, as_core=False))
    training = asyncio.create_task(replica.train(train(run, 0, 0, (put_long_micro_step(blobs),))))
    async with asyncio.timeout(20), cells.client("cell-1") as asking:
        while (await asking.status()).busy != "train":
            assert not training.done()
    assert cells.end("cell-1", signal.SIGTERM) == -signal.SIGTERM
    with pytest.raises(p.ReplicaUnavailable):
        await training
