"""A Megatron GPTModel of a policy's shape, and its forward pass over packed trajectories.

One idea: the shape decides the architecture, the machine decides the modules (Transformer Engine with CUDA, plain
torch without), the world decides which part this rank has, and the rest of gyre sees one function from packed token
ids to target log-probs, the same on every rank. Weights are not read here (``infra.megatron.model.weights``), nothing
is trained here (``infra.megatron.replica``).
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from infra.megatron.model import cpu_shim
from infra.megatron.model.attention import PackedRuns, shared_transformer_engine_attention
from infra.megatron.model.collectives import FromPreviousStage, SumOfParts, ToNextStage, to_earlier_stages
from infra.megatron.model.layers import with_torch_pieces
from infra.megatron.model.layout import ON_CPU, RankPlace, UnsupportedLayout, context_group, pipeline_group, start_world
from infra.megatron.model.pack import NOTHING, Pack, Runs
from infra.megatron.model.shape import PolicyShape

from megatron.core.models.gpt import GPTModel  # isort: skip - after infra.megatron.model.layout, which installs the shim
from megatron.core.models.gpt.gpt_layer_specs import (  # isort: skip
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

LOGIT_CHUNK_BYTES: Final = 64 << 20
"""fp32 logits computed at a time."""

LOGIT_KEEP_BYTES: Final = 256 << 20
"""Above this many bytes of logits in a micro-step they are recomputed in the backward pass, not kept."""


def device() -> torch.device:
    """Where this process trains."""
    return torch.device("cpu") if ON_CPU else torch.device("cuda", torch.cuda.current_device())


def build(shape: PolicyShape, *, share_prefixes: bool = ON_CPU) -> GPTModel:
    """This rank's part of a GPTModel, with arbitrary weights (fp32 on CPU, bf16 with CUDA), on this process's device.

    ``share_prefixes``: whether the model takes packs in which trajectories share prefixes. Raises UnsupportedLayout
    when the world's layout does not divide the shape. Begins a world of one rank if none has begun.
    """
    start_world()
    place = RankPlace.here()
    check_layout(shape, place)
    config = _transformer_config(shape, place)
    experts = shape.experts or None
    if experts:
        cpu_shim.prepare_experts()
    if ON_CPU:
        local = get_gpt_layer_local_spec(
            num_experts=experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
        )
        spec = with_torch_pieces(local, shape.layers // place.layout.pp)
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=False, qk_layernorm=True
        )
        if share_prefixes:
            if place.layout.cp > 1:
                raise UnsupportedLayout(f"{place.layout}: Transformer Engine shares prefixes on one context rank only")
            spec.submodules.self_attention.submodules.core_attention = shared_transformer_engine_attention()
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocab,
        max_sequence_length=shape.positions,
        pre_process=place.first_stage,
        post_process=place.last_stage,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
    )
    return model.to(device())


def check_layout(shape: PolicyShape, place: RankPlace) -> None:
    """Raises UnsupportedLayout, naming what cannot be divided."""
    layout = place.layout
    parts = {
        "vocabulary": (shape.vocab, layout.tp),
        "query heads": (shape.heads, layout.tp),
        "key/value heads": (shape.groups, layout.tp),
        "feed-forward width": (shape.ffn, layout.tp),
        "layers": (shape.layers, layout.pp),
        "experts": (shape.experts, layout.ep),
    }
    wrong = [f"{count} {name} by {ranks}" for name, (count, ranks) in parts.items() if count % ranks]
    if layout.ep > 1 and not shape.experts:
        wrong.append(f"no experts by {layout.ep}")
    if shape.experts and layout.tp > 1:
        wrong.append("layers of experts by tp: Megatron does that only with sequence parallelism, unused here")
    if wrong:
        raise UnsupportedLayout(f"{layout} cannot divide {', '.join(wrong)}")


def _transformer_config(shape: PolicyShape, place: RankPlace) -> TransformerConfig:
    dtype = torch.float32 if ON_CPU else torch.bfloat16
    experts: dict[str, Any] = {}
    if shape.experts:
        # nothing but the policy's loss may move a router, and no token may be dropped because of its neighbours
        experts = {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.experts_per_token,
            "moe_router_pre_softmax": not shape.normalised_top_k,
            "moe_ffn_hidden_size": shape.ffn,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_z_loss_coeff": None,
            "moe_expert_capacity_factor": None,
            "moe_router_enable_expert_bias": False,
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": False,
        }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        tensor_model_parallel_size=place.layout.tp,
        pipeline_model_parallel_size=place.layout.pp,
        context_parallel_size=place.layout.cp,
        expert_model_parallel_size=place.layout.ep,
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
        **experts,
    )


def target_logprobs(model: GPTModel, ids: Tensor, runs: Runs, target: Tensor, temperature: Tensor) -> Tensor:
    """Log-probability of every target token given the tokens before it in its own trajectory.

    ids int[n], target bool[n], temperature float[n] (> 0 where target), for the n tokens of ``runs``. Returns [n], zero
    where target is False, float32 (float64 for a float64 model), the same values on all ranks that work on this
    micro-step; its gradient reaches the part of the model that this rank has. Logits exist at target positions only, a
    chunk at a time. Raises ValueError when a trajectory begins with a target, or the tokens are not those of ``runs``.
    """
    place = RankPlace.here()
    if ids.numel() != runs.tokens:
        raise ValueError(f"{ids.numel()} tokens are not the {runs.tokens} of the runs")
    where = target.nonzero().squeeze(1)
    before = torch.from_numpy(runs.predecessors).to(ids.device)[where]
    if bool((before == NOTHING).any()):
        raise ValueError("the first token of a trajectory is a target, but nothing precedes it")
    pack = Pack(runs, place.layout.cp, place.cp)
    hidden = _hidden_states(model, ids, pack, place)
    exact = torch.promote_types(hidden.dtype, torch.float32)
    if not place.last_stage:
        from_last: Tensor = ToNextStage.apply(hidden, runs.tokens, exact, pipeline_group())
        return from_last

    labels, heat = ids.long(), temperature.to(exact)
    if pack.ranks > 1:
        row = torch.full((int(pack.cu_seqlens[-1]),), NOTHING, device=ids.device)
        row[torch.from_numpy(pack.held).to(ids.device)] = torch.arange(len(pack.held), device=ids.device)
        before = row[torch.from_numpy(pack.where).to(ids.device)[before]]
        mine = before != NOTHING
        where, before = where[mine], before[mine]
    logprobs = torch.zeros(runs.tokens, dtype=exact, device=ids.device).index_put(
        (where,), _logprobs(model, hidden.index_select(0, before), labels[where], heat[where])
    )
    if pack.ranks > 1:
        logprobs = SumOfParts.apply(logprobs, context_group())
    return to_earlier_stages(logprobs, pipeline_group())


def _hidden_states(model: GPTModel, ids: Tensor, pack: Pack, place: RankPlace) -> Tensor:
    """[this rank's tokens, hidden]: what this stage makes of them; on the last stage with the final norm."""
    if pack.ranks > 1:
        padded = torch.zeros(int(pack.cu_seqlens[-1]), dtype=ids.dtype, device=ids.device)
        padded[torch.from_numpy(pack.where).to(ids.device)] = ids
        ids = padded[torch.from_numpy(pack.held).to(ids.device)]
    if place.first_stage:
        embedded = model.embedding(input_ids=ids.long()[None], position_ids=None)
    else:
        anchor = torch.zeros((), dtype=model.config.pipeline_dtype, device=ids.device, requires_grad=True)
        embedded = None
        model.set_input_tensor(
            FromPreviousStage.apply(anchor, (ids.numel(), 1, model.config.hidden_size), pipeline_group())
        )
    # As long as the whole pack, so that Megatron reads it as one row per packed token: each token's place in its own
    # trajectory, which for the own run of a shared prefix doesn't begin with 0.
    positions = torch.from_numpy(pack.positions).to(ids.device)
    rope = model.rotary_pos_emb.get_emb(int(pack.positions.max()) + 1).index_select(0, positions)
    out = model.decoder(
        hidden_states=embedded,
        attention_mask=None,
        rotary_pos_emb=rope,
        packed_seq_params=PackedRuns.of(pack, ids.device),
    )
    return out[:, 0]


def _logprobs(model: GPTModel, hidden: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
    vocab = model.vocab_size
    rows = max(1, LOGIT_CHUNK_BYTES // (4 * vocab))
    recompute = 4 * vocab * labels.numel() > LOGIT_KEEP_BYTES
    parts: list[Tensor] = []
    for chunk in zip(hidden.split(rows), labels.split(rows), temperature.split(rows), strict=True):
        if recompute:
            parts.append(checkpoint(_chunk_logprobs, model, *chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk_logprobs(model, *chunk))
    return torch.cat(parts)


def _chunk_logprobs(model: GPTModel, hidden: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    logits, _ = model.output_layer(hidden[:, None], weight=weight)
    scaled = logits[:, 0].to(temperature.dtype) / temperature[:, None]
    if model.config.tensor_model_parallel_size > 1:
        return -vocab_parallel_cross_entropy(scaled, labels)
    return -F.cross_entropy(scaled, labels, reduction="none")
