"""A replica hands its weights to a real engine in the middle of a step, and goes on with the step."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.megatron.checkpoint import CandidateFacts, initial_candidate, load_candidate, load_weights, save_candidate
from infra.megatron.model.model import target_logprobs
from infra.megatron.model.pack import Runs
from infra.megatron.replica import Replica
from infra.sglang.client import EngineClient
from infra.sglang.generation import GenerateRequest
from infra.sglang.launch import engine_command, engine_environment
from infra.state.blobs import BlobStore
from tests.processes import free_port
from trajectory.config import LossConfig, OptimizerConfig
from workflows.contracts.orders import CellOrder, Desired, FinishInput, RunContext, ServeOrder, TrainInput

pytestmark = pytest.mark.stack


@pytest.fixture
def engine_url(policy_dir: Path, tmp_path: Path) -> Iterator[str]:
    """Of an engine that is starting."""
    port = free_port()
    command = engine_command(policy_dir, "127.0.0.1", port, max_total_tokens=2048, context_length=256)
    process = subprocess.Popen(command, env=engine_environment(tmp_path), start_new_session=True)
    yield f"http://127.0.0.1:{port}"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


async def test_an_engine_takes_served_weights_and_the_open_steps_sum_survives(
    engine_url: str,
    cells: Any,
    put_micro_steps: Callable[[BlobStore, int, int], tuple[str, ...]],
    policy_dir: Path,
) -> None:
    run, blobs = "served", cells.blobs
    base = initial_candidate(blobs, run, policy_dir)
    first = load_candidate(blobs, base)
    newer = {name: tensor * 1.1 for name, tensor in load_weights(blobs, first).items()}
    facts = first.model_dump(exclude={"weights_ref", "checksum", "optimizer_ref", "gradient_ref"})
    newer_ref = save_candidate(blobs, CandidateFacts(**(facts | {"version": 1})), newer, {})
    refs = put_micro_steps(blobs, 2, 5)
    context = RunContext(run=run, policy="policy", optimizer=OptimizerConfig(), loss=LossConfig())
    desired = Desired(epoch=1, role="train", core=True, candidate_ref=base, context=context)
    prepare = CellOrder(cell="cell-0", desired=desired)
    cells.start("cell-0")
    core = await cells.ready("cell-0")
    prepared = await core.prepare(prepare)
    order = {"cell": "cell-0", "incarnation": prepared.replica, "run": run, "step": 0, "version": 0}
    await core.train(TrainInput(**order, micro_steps=list(refs)))

    engine = EngineClient(engine_url, vocab_size=160)
    await engine.wait_ready(120)
    checksums = []
    for version, ref in ((0, base), (1, newer_ref), (0, base), (1, newer_ref)):
        serves = desired.model_copy(update={"role": "rollout", "version": version, "candidate_ref": ref})
        served = await core.serve(ServeOrder(cell="cell-0", desired=serves, engine_url=engine_url))
        assert await engine.weight_version() == version
        checksums.append(served.checksum)
    assert checksums[0] == checksums[2] != checksums[1] == checksums[3]

    prompt = [5, 77, 140, 3]
    generation = await engine.generate(
        GenerateRequest(input_ids=prompt, rid="r", max_new_tokens=12, temperature=0.8, version=1, deadline_s=60)
    )
    replica = Replica(policy_dir)
    replica.load(newer, 1)
    ids = torch.tensor([*prompt, *generation.output_ids])
    sampled = torch.arange(len(ids)) >= len(prompt)
    logprobs = target_logprobs(replica._model, ids, Runs.alone(len(ids)), sampled, torch.full((len(ids),), 0.8))
    assert torch.allclose(logprobs[sampled], torch.tensor(generation.logprobs), atol=1e-3)

    await engine.close()

    assert (await core.status()).done == refs
    assert (await core.prepare(prepare)).source == "blob"
    finish = FinishInput(**order, normaliser=4, micro_steps=list(refs), satellites=[], record_gradient=False)
    finished = await core.finish(finish)
    assert finished.version == 1 and finished.grad_norm > 0
    await core.close()
