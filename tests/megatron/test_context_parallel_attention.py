"""Attention over sequences that are split between two ranks is attention over the whole sequences."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infra.megatron import model  # noqa: F401 - installs the shim, which must precede megatron
from infra.megatron.layers import TorchCoreAttention, zigzag_positions

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

LENGTHS = (8, 24)  # multiples of 2 * ranks
RANKS, HEADS, GROUPS, WIDTH = 2, 4, 2, 8


def inputs() -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(5)
    return tuple(torch.randn(sum(LENGTHS), heads, WIDTH, generator=random) for heads in (HEADS, GROUPS, GROUPS, HEADS))


def attend(group: Any, held: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output and gradients (for a fixed output gradient) at the positions ``held`` of the pack."""
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS)
    attention = TorchCoreAttention(config, pg_collection=SimpleNamespace(cp=group))
    *tensors, weight = (tensor[held].clone() for tensor in inputs())
    for tensor in tensors:
        tensor.requires_grad_()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    out = attention(*tensors, packed_seq_params=packed)
    (out * weight.flatten(1)).sum().backward()
    return (out.detach(), *(tensor.grad for tensor in tensors))


def held_by(rank: int) -> torch.Tensor:
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return torch.cat(
        [start + zigzag_positions(length, RANKS, rank) for start, length in zip(starts, LENGTHS, strict=True)]
    )


def test_two_ranks_compute_the_shards_and_gradients_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    whole = attend(None, torch.arange(sum(LENGTHS)))
    store = torch.distributed.HashStore()

    def one_rank(rank: int) -> tuple[torch.Tensor, ...]:
        group = torch.distributed.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=30))
        return attend(group, held_by(rank))

    with ThreadPoolExecutor(RANKS) as ranks:
        for rank, shards in enumerate(ranks.map(one_rank, range(RANKS))):
            for shard, expected in zip(shards, whole, strict=True):
                assert torch.allclose(shard, expected[held_by(rank)], atol=1e-5)
