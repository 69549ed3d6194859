"""A Megatron GPTModel of a policy's shape, and its forward pass over packed sequences.

One idea: the shape decides the architecture, the machine decides the modules (Transformer Engine with CUDA, plain
torch without), and the rest of gyre sees one function from packed token ids to target log-probs. Weights are not read
here (``infra.megatron.weights``), nothing is trained here (``infra.megatron.replica``).
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from infra.megatron import cpu_shim

ON_CPU = cpu_shim.install()

from megatron.core import parallel_state  # noqa: E402 - the shim must be first
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel.random import initialize_rng_tracker  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from infra.megatron.layers import with_torch_pieces  # noqa: E402
from infra.megatron.shape import PolicyShape  # noqa: E402

LOGIT_CHUNK_BYTES: Final = 64 << 20
"""fp32 logits computed at a time."""

LOGIT_KEEP_BYTES: Final = 256 << 20
"""Above this many bytes of logits in a micro-step they are recomputed in the backward pass, not kept."""


def device() -> torch.device:
    """Where this process trains."""
    return torch.device("cpu") if ON_CPU else torch.device("cuda", torch.cuda.current_device())


def start_world() -> None:
    """The process's own Megatron world of one rank, once per process.

    The store is in memory and gloo is bound to the loopback device: a cell of one rank opens no port to the network.
    Cells never share a world; what they exchange goes through the transfer engine.
    """
    if dist.is_initialized():
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo" if ON_CPU else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True)  # nothing is random in training: dropout is zero


def build(shape: PolicyShape) -> GPTModel:
    """A GPTModel of this shape on this process's device, with arbitrary weights (fp32 on CPU, bf16 with CUDA)."""
    start_world()
    dtype = torch.float32 if ON_CPU else torch.bfloat16
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=not ON_CPU,
        attention_softmax_in_fp32=True,
        calculate_per_token_loss=True,
        use_cpu_initialization=ON_CPU,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    if ON_CPU:
        local = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        spec = with_torch_pieces(local, shape.layers)
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocab,
        max_sequence_length=shape.positions,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
    )
    return model.to(device())


def target_logprobs(model: GPTModel, ids: Tensor, cu_seqlens: Tensor, target: Tensor, temperature: Tensor) -> Tensor:
    """Log-probability of every target token given the earlier tokens of its own sequence.

    ids int[n], cu_seqlens int[s + 1] (no empty sequence), target bool[n], temperature float[n] (> 0 where target).
    Returns float32[n], zero where target is False. Logits exist at target positions only, a chunk at a time. Raises
    ValueError when a sequence begins with a target, or is empty.
    """
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    if not lengths or min(lengths) < 1 or ends[0] != 0 or ends[-1] != ids.numel():
        raise ValueError(f"cu_seqlens does not cut {ids.numel()} tokens into non-empty sequences: {ends[:8]}…")
    if bool(target[cu_seqlens[:-1].long()].any()):
        raise ValueError("the first token of a sequence is a target, but nothing precedes it")
    where = target.nonzero().squeeze(1)
    hidden = _hidden_states(model, ids, cu_seqlens.int(), max(lengths)).index_select(0, where - 1)
    labels, heat = ids.long().index_select(0, where), temperature.float().index_select(0, where)

    vocab = model.vocab_size
    rows = max(1, LOGIT_CHUNK_BYTES // (4 * vocab))
    recompute = 4 * vocab * where.numel() > LOGIT_KEEP_BYTES
    parts: list[Tensor] = []
    for chunk in zip(hidden.split(rows), labels.split(rows), heat.split(rows), strict=True):
        if recompute:
            parts.append(checkpoint(_chunk_logprobs, model, *chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk_logprobs(model, *chunk))
    return torch.zeros(ids.numel(), device=ids.device).index_put((where,), torch.cat(parts))


def _hidden_states(model: GPTModel, ids: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """[n, hidden]: the decoder's output, final norm included."""
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        # Exactly the longest: Megatron reads a rope table as long as the whole pack as one position per packed token.
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    embedded = model.embedding(input_ids=ids.long()[None], position_ids=None)
    rope = model.rotary_pos_emb(longest, packed_seq=True)
    out = model.decoder(hidden_states=embedded, attention_mask=None, rotary_pos_emb=rope, packed_seq_params=packed)
    return out[:, 0]


def _chunk_logprobs(model: GPTModel, hidden: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    logits, _ = model.output_layer(hidden[:, None], weight=weight)
    return -F.cross_entropy(logits[:, 0].float() / temperature[:, None], labels, reduction="none")
