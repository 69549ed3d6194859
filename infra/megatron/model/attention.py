# mypy: disallow-subclassing-any=False
"""Core attention over packs of trajectories that share prefixes, where each shared key and value is computed once.

``TorchCoreAttention`` runs on CPU: per piece of the pack (``infra.megatron.model.pack``) torch's flash kernel attends
to the queries' own keys, causally, and to each earlier span whole; the parts are merged by their log-sum-exp. The
backward pass gives every part the merged output and log-sum-exp, from which the kernel recomputes that part's share of
the probabilities, and the gradients of shared keys and values add up where they lie. Nothing of size s x s exists.
``bottom_right`` builds the same for Transformer Engine: keys and values gathered along each path, one causal call with
more keys than queries. Invariant: a token sees the tokens before it in its own trajectory and itself, whatever else is
in the pack. Knows nothing of weights or of what is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from infra.megatron.model import cpu_shim
from infra.megatron.model.pack import Pack

cpu_shim.install()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402 - the shim must be first
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

_FLASH: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class PackedRuns(PackedSeqParams):
    """Megatron's parameters of packed sequences, with the pack that they are of."""

    pack: Pack | None = None

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> PackedRuns:
        ends = torch.from_numpy(pack.cu_seqlens.astype(np.int32)).to(device)
        longest = int(np.diff(pack.cu_seqlens).max())
        return cls(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            pack=pack,
        )


class TorchCoreAttention(MegatronModule):
    """Causal attention with grouped queries over packed runs, optionally split over a context-parallel group."""

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
        packed_seq_params: PackedRuns | None = None,
        **_: Any,
    ) -> Tensor:
        """[t, heads, d] query and [t, groups, d] key, value (t: this rank's tokens of the pack) -> [t, heads * d].

        Raises ValueError for anything but a pack.
        """
        if not isinstance(packed_seq_params, PackedRuns) or packed_seq_params.pack is None:
            raise ValueError("TorchCoreAttention takes packed runs only")
        pack = packed_seq_params.pack
        if pack.ranks > 1:
            order = torch.from_numpy(pack.gathered).to(key.device)
            key, value = (_GatherTokens.apply(part, self.cp_group)[order] for part in (key, value))
        out: Tensor = _Attend.apply(query, key, value, (pack, self.scale))
        return out.flatten(1)


class _Attend(torch.autograd.Function):
    """[t, heads, d] from queries [t, heads, d] and keys, values [padded, groups, d], by the pieces of a pack.

    ``how``: the pack, and the scale of the scores (None: 1 / sqrt(d)).
    """

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, how: tuple[Pack, float | None]) -> Tensor:
        pack, scale = how
        q, k, v = _batched(query), _batched(key), _batched(value)
        out, lse = torch.empty_like(query), torch.empty(query.shape[:2], dtype=query.dtype)
        merged, merged_lse = _batched(out), lse.t()[None]
        for piece in pack.pieces:
            here = q[:, :, slice(*piece.queries)]
            part, part_lse = _FLASH(
                here, k[:, :, slice(*piece.own)], v[:, :, slice(*piece.own)], 0.0, True, scale=scale
            )
            for span in piece.before:
                more, more_lse = _FLASH(here, k[:, :, slice(*span)], v[:, :, slice(*span)], 0.0, False, scale=scale)
                part, part_lse = _merge(part, part_lse, more, more_lse)
            merged[:, :, slice(*piece.queries)] = part
            merged_lse[:, :, slice(*piece.queries)] = part_lse
        context.save_for_backward(query, key, value, out, lse)
        context.pack, context.scale = pack, scale
        return out

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = context.saved_tensors
        q, k, v, o, g = (_batched(tensor) for tensor in (query, key, value, out, grad.contiguous()))
        logs = lse.t()[None]
        grads = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        dq, dk, dv = (_batched(tensor) for tensor in grads)
        for piece in context.pack.pieces:
            at = slice(*piece.queries)
            for number, span in enumerate((piece.own, *piece.before)):
                of, causal = slice(*span), number == 0
                parts = _FLASH_BACKWARD(
                    g[:, :, at],
                    q[:, :, at],
                    k[:, :, of],
                    v[:, :, of],
                    o[:, :, at],
                    logs[:, :, at],
                    0.0,
                    causal,
                    scale=context.scale,
                )
                if causal:
                    dq[:, :, at] = parts[0]
                else:
                    dq[:, :, at] += parts[0]
                dk[:, :, of] += parts[1]
                dv[:, :, of] += parts[2]
        return *grads, None


def _batched(tensor: Tensor) -> Tensor:
    """A view [1, heads, t, d] of [t, heads, d]."""
    return tensor.transpose(0, 1)[None]


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both parts, from each part's output and the log-sum-exp of its scores."""
    both = torch.logaddexp(lse, more_lse)
    return out * (lse - both).exp()[..., None] + more * (more_lse - both).exp()[..., None], both


class _GatherTokens(torch.autograd.Function):
    """All ranks' tokens [t, ...] one after the other; backward sums what every rank says about this rank's tokens."""

    @staticmethod
    def forward(context: Any, shard: Tensor, group: Any) -> Tensor:
        context.group = group
        shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(shards, shard.contiguous(), group=group)
        return torch.cat(shards)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=context.group)
        return summed.chunk(context.group.size())[context.group.rank()], None


BOTTOM_RIGHT: Final = SimpleNamespace(name="padding_causal_bottom_right")
"""Transformer Engine's name for: the last query sees all keys of its sequence, the one before all but the last, …"""


def bottom_right(pack: Pack, device: torch.device) -> tuple[Tensor, PackedSeqParams]:
    """Which keys to gather, and the packed parameters of one causal call over all runs, aligned at the bottom right.

    The gathered keys and values of a run are those of its whole trajectory, so they take the memory of unshared ones;
    all else is computed once per token. Gathering sums the gradients of shared ones. For one context-parallel rank.
    """
    paths = [
        np.concatenate([np.arange(*span) for span in (*before, own)])
        for before, own in ((piece.before, piece.own) for piece in pack.pieces)
    ]
    lengths = [len(path) for path in paths]
    return torch.from_numpy(np.concatenate(paths)).to(device), PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.from_numpy(pack.cu_seqlens.astype(np.int32)).to(device),
        cu_seqlens_kv=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device),
        max_seqlen_q=int(np.diff(pack.cu_seqlens).max()),
        max_seqlen_kv=max(lengths),
    )


def shared_transformer_engine_attention() -> type[Any]:
    """Transformer Engine's attention, which for a pack that shares prefixes makes the call of ``bottom_right``.

    A function, since Transformer Engine can only be imported where there is a GPU.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class SharedTEAttention(TEDotProductAttention):
        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: Any,
            *args: Any,
            packed_seq_params: PackedSeqParams | None = None,
            **more: Any,
        ) -> Tensor:
            pack = getattr(packed_seq_params, "pack", None)
            if pack is not None and pack.runs.shared:
                keys, packed_seq_params = bottom_right(pack, key.device)
                key, value, attn_mask_type = key[keys], value[keys], BOTTOM_RIGHT
            out: Tensor = super().forward(
                query, key, value, attention_mask, attn_mask_type, *args, packed_seq_params=packed_seq_params, **more
            )
            return out

    return SharedTEAttention
