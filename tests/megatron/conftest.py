"""A tiny random policy, micro-steps of random trajectories, and real Valkey and replica processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.megatron.protocol import ReplicaClient, ReplicaUnavailable
from infra.state.blobs import BlobStore
from trajectory.micro_step import MicroStep

VOCAB = 160
REPOSITORY = Path(__file__).resolve().parents[2]


SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}


def save_policy(folder: Path, *, tied: bool, seed: int = 0) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return save_random(Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=tied, **SHAPE)), folder, seed)


def save_random(model: Any, folder: Path, seed: int) -> Path:
    """Save a model with random weights that are large enough for every gradient to count."""
    import torch

    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        low, high = (0.5, 1.5) if "norm" in name else (-0.2, 0.2)
        parameter.data.uniform_(low, high, generator=random)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"), tied=True)


@dataclass(frozen=True)
class Trajectory:
    ids: np.ndarray
    target: np.ndarray
    behaviour: np.ndarray
    advantage: float
    weight: float


def make_trajectories(count: int, seed: int) -> list[Trajectory]:
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(random.integers(4, 40))
        target = random.random(length) > 0.5
        target[0], target[-1] = False, True
        made.append(
            Trajectory(
                ids=random.integers(0, VOCAB, length).astype(np.int32),
                target=target,
                behaviour=np.where(target, -5 + random.standard_normal(length), 0).astype(np.float32),
                advantage=float(random.standard_normal()),
                weight=float(random.uniform(0.2, 1)),
            )
        )
    return made


def pack(trajectories: Sequence[Trajectory]) -> MicroStep:
    target = np.concatenate([t.target for t in trajectories])
    only_targets = np.where(target, 0, -1).astype(np.int32)
    return MicroStep(
        ids=np.concatenate([t.ids for t in trajectories]),
        cu_seqlens=np.cumsum([0, *(len(t.ids) for t in trajectories)]).astype(np.int32),
        prefix_of=np.full(len(trajectories), -1, np.int32),
        prefix_len=np.zeros(len(trajectories), np.int32),
        target=target,
        behaviour=np.concatenate([t.behaviour for t in trajectories]),
        temperature=np.where(target, 0.8, 1).astype(np.float32),
        version=only_targets,
        call=only_targets,
        offset=only_targets,
        advantage=np.array([t.advantage for t in trajectories]),
        weight=np.array([t.weight for t in trajectories]),
        episode_index=np.arange(len(trajectories), dtype=np.int32),
        episodes=tuple(f"e{i}" for i in range(len(trajectories))),
        kinds=("main",) * len(trajectories),
    )


@pytest.fixture(scope="session")
def pack_trajectories() -> Callable[[Sequence[Trajectory]], MicroStep]:
    return pack


@pytest.fixture(scope="session")
def trajectories() -> list[Trajectory]:
    return make_trajectories(12, seed=1)


@pytest.fixture
def put_micro_steps() -> Callable[[BlobStore, int, int], tuple[str, ...]]:
    """(blobs, count, seed) -> references of ``count`` new micro-steps."""

    def put(blobs: BlobStore, count: int, seed: int) -> tuple[str, ...]:
        return tuple(blobs.put(pack(make_trajectories(3, seed=1000 * seed + i)).to_bytes()) for i in range(count))

    return put


@pytest.fixture
def put_long_micro_step() -> Callable[[BlobStore], str]:
    """(blobs) -> reference of a micro-step that takes seconds to train."""
    return lambda blobs: blobs.put(pack(make_trajectories(2000, seed=7)).to_bytes())


@pytest.fixture(scope="session")
def untied_policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def expert_policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose layers have four experts, two per token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True, **SHAPE
    )
    return save_random(Qwen3MoeForCausalLM(config), tmp_path_factory.mktemp("experts"), 0)


class Cells:
    """Replica processes of one installation, by cell name."""

    def __init__(self, home: Path, redis_url: str, policy: Path) -> None:
        self.home, self.redis_url, self.policy = home, redis_url, policy
        self.blobs = BlobStore(str(home / "blobs"))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, cell: str) -> None:
        """Start the cell's replica unless it runs."""
        if cell in self.processes and self.processes[cell].poll() is None:
            return
        environment = os.environ | {
            "GYRE_HOME": str(self.home),
            "GYRE_REDIS_URL": self.redis_url,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-m", "infra.megatron.server", "--cell", cell, "--policy", str(self.policy)]
        self.processes[cell] = subprocess.Popen(command, cwd=REPOSITORY, env=environment)

    def client(self, cell: str) -> ReplicaClient:
        return ReplicaClient(self.home / "cells" / cell / "replica.sock")

    async def ready(self, cell: str) -> ReplicaClient:
        client = self.client(cell)
        deadline = time.monotonic() + 60
        while True:
            try:
                await client.status()
                return client
            except ReplicaUnavailable:
                assert self.processes[cell].poll() is None, f"the replica of {cell} died at its start"
                assert time.monotonic() < deadline, f"the replica of {cell} was not ready within 60 s"
                await asyncio.sleep(0.1)

    def end(self, cell: str, by: signal.Signals = signal.SIGKILL) -> int:
        """End the cell's replica and wait for it (10 s at most); returns its exit code."""
        self.processes[cell].send_signal(by)
        return self.processes[cell].wait(10)


@pytest.fixture(scope="session")
def cells(valkey_url: str, policy_dir: Path) -> Iterator[Cells]:
    with tempfile.TemporaryDirectory(prefix="gyre-cells-", dir="/tmp") as home:  # a socket's path must be short
        started = Cells(Path(home), valkey_url, policy_dir)
        yield started
        for process in started.processes.values():
            process.terminate()
        for process in started.processes.values():
            process.wait(15)


@pytest.fixture
async def clients(cells: Cells) -> AsyncIterator[tuple[ReplicaClient, ReplicaClient]]:
    """Two live replicas, ``cell-0`` and ``cell-1``, started once and again if one was killed."""
    for cell in ("cell-0", "cell-1"):
        cells.start(cell)
    one, two = [await cells.ready(cell) for cell in ("cell-0", "cell-1")]
    yield one, two
    await one.close()
    await two.close()
