"""Attention over sequences that are split between two ranks is attention over the whole sequences."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from infra.megatron.model import model  # noqa: F401 - installs the shim, which must precede megatron
from infra.megatron.model.attention import PackedRuns, TorchCoreAttention
from infra.megatron.model.pack import Pack, Runs

from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

# the runs of a tree, all multiples of 2 * ranks; the last two go on from the middle of the first and the third
LENGTHS, PREFIX_OF, PREFIX_LEN = (8, 24, 12, 4), (-1, -1, 1, 2), (0, 0, 10, 15)
RUNS = Runs(np.cumsum([0, *LENGTHS]), np.array(PREFIX_OF), np.array(PREFIX_LEN))
RANKS, HEADS, GROUPS, WIDTH = 2, 4, 2, 8


def inputs() -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(5)
    return tuple(torch.randn(sum(LENGTHS), heads, WIDTH, generator=random) for heads in (HEADS, GROUPS, GROUPS, HEADS))


def attend(group: Any, pack: Pack) -> tuple[torch.Tensor, ...]:
    """Output and gradients (for a fixed output gradient) at the tokens that the rank holds."""
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS)
    attention = TorchCoreAttention(config, pg_collection=SimpleNamespace(cp=group))
    *tensors, weight = (tensor[pack.held].clone() for tensor in inputs())
    for tensor in tensors:
        tensor.requires_grad_()
    out = attention(*tensors, packed_seq_params=PackedRuns.of(pack, torch.device("cpu")))
    (out * weight.flatten(1)).sum().backward()
    return (out.detach(), *(tensor.grad for tensor in tensors))


def test_two_ranks_compute_the_shards_and_gradients_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    whole = attend(None, Pack(RUNS))
    store = torch.distributed.HashStore()

    def one_rank(rank: int) -> tuple[torch.Tensor, ...]:
        group = torch.distributed.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=30))
        return attend(group, Pack(RUNS, RANKS, rank))

    with ThreadPoolExecutor(RANKS) as ranks:
        for rank, shards in enumerate(ranks.map(one_rank, range(RANKS))):
            held = Pack(RUNS, RANKS, rank).held
            for shard, expected in zip(shards, whole, strict=True):
                assert torch.allclose(shard, expected[held], atol=1e-5)
