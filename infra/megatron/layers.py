# mypy: disallow-subclassing-any=False
"""The two modules that Megatron's local layer spec lacks: an RMS norm and a causal attention for packed sequences.

Megatron's own local attention refuses packed (THD) input and context parallelism, and materialises s x s scores; this
one is torch's scaled dot product attention per sequence. Invariant: a token attends to earlier tokens of its own
sequence only, whatever else is in the pack. Used on CPU; with CUDA the Transformer Engine spec takes their place. They
know nothing of weights' names or of what is trained.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class TorchRMSNorm(torch.nn.RMSNorm):
    """torch's RMS norm with the constructor that Megatron's specs call and the mark that sequence parallelism reads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


class TorchCoreAttention(MegatronModule):
    """Causal attention with grouped queries over packed sequences, optionally split over a context-parallel group."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group: Any = getattr(groups, "cp", None)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """[t, heads, d] query and [t, groups, d] key, value (t: this rank's tokens of all sequences) -> [t, heads * d].

        Raises ValueError for unpacked input. With context parallelism every sequence's padded length must be a
        multiple of twice the group's size; a rank holds chunks r and 2cp - 1 - r of it.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("TorchCoreAttention takes packed sequences (qkv_format 'thd') only")
        ends = packed_seq_params.cu_seqlens_q_padded
        ends = (packed_seq_params.cu_seqlens_q if ends is None else ends).tolist()
        lengths = [(end - start) // self._cp for start, end in pairwise(ends)]
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._one_sequence(*part) for part in parts])

    @property
    def _cp(self) -> int:
        return 1 if self.cp_group is None else int(self.cp_group.size())

    def _one_sequence(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens, heads, width = query.shape
        mask = None
        if self._cp > 1:
            length = tokens * self._cp
            held = [zigzag_positions(length, self._cp, rank) for rank in range(self._cp)]
            in_order = torch.argsort(torch.cat(held)).to(key.device)
            key = _GatherSequence.apply(key, self.cp_group).flatten(0, 1)[in_order]
            value = _GatherSequence.apply(value, self.cp_group).flatten(0, 1)[in_order]
            mine = held[self.cp_group.rank()]
            mask = (mine[:, None] >= torch.arange(length)[None]).to(key.device)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=heads != key.shape[1],
        )
        return out[0].transpose(0, 1).reshape(tokens, heads * width)


class _GatherSequence(torch.autograd.Function):
    """All ranks' shards [t, ...] as [cp, t, ...]; backward sums what every rank says about this rank's shard."""

    @staticmethod
    def forward(context: Any, shard: Tensor, group: Any) -> Tensor:
        context.group = group
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(shards, shard.contiguous(), group=group)
        return torch.stack(shards)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=context.group)
        return summed[context.group.rank()], None


def zigzag_positions(length: int, cp: int, rank: int) -> Tensor:
    """int64[length / cp]: which positions of a sequence of padded ``length`` a context-parallel rank holds.

    Two chunks per rank, one from each end, so that causal attention costs every rank the same.
    """
    chunk = length // (2 * cp)
    last = 2 * cp - 1 - rank
    return torch.cat([torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange(last * chunk, (last + 1) * chunk)])


def with_torch_pieces(spec: ModuleSpec, layers: int) -> TransformerBlockSubmodules:
    """A block of ``layers`` layers of Megatron's local ``spec`` with its norms and core attention replaced."""
    pieces = spec.submodules
    pieces.input_layernorm = TorchRMSNorm
    pieces.pre_mlp_layernorm = TorchRMSNorm
    attention = pieces.self_attention.submodules
    attention.core_attention = TorchCoreAttention
    attention.q_layernorm = TorchRMSNorm
    attention.k_layernorm = TorchRMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=TorchRMSNorm)
