"""The shape of a policy, read from a Hugging Face folder.

Invariant: what ``config.json`` asks for and the trainer does not build is refused by name, so a policy never trains as
something slightly different from what is served. Knows nothing of torch or Megatron.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class UnsupportedPolicy(ValueError):
    """The policy's configuration asks for something that the trainer does not build."""


class PolicyShape(BaseModel):
    """What ``config.json`` of a Qwen3 policy, dense or with experts, says, as far as it decides the computation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int
    hidden: int
    heads: int
    groups: int
    """Key/value heads."""
    head_dim: int
    ffn: int
    """Feed-forward width; of one expert, where there are experts."""
    vocab: int
    positions: int
    norm_eps: float
    rope_theta: float
    tied: bool
    """The output layer is the embedding."""
    experts: int = 0
    """Experts of each layer, 0 for a dense policy. Each token's routing is computed anew by the trainer: the routing
    that sampled it is not replayed, so a token near a tie may be sent to other experts than it was then."""
    experts_per_token: int = 0
    normalised_top_k: bool = False
    """The weights of a token's experts are scaled to sum to 1."""


def read_shape(policy_dir: Path) -> PolicyShape:
    """The shape of the policy in a Hugging Face folder. Raises UnsupportedPolicy, naming what is not supported."""
    config: dict[str, Any] = json.loads((policy_dir / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    scaling = (
        rope.get("rope_type", "default") if rope else (config.get("rope_scaling") or {}).get("rope_type", "default")
    )
    sparse = config.get("model_type") == "qwen3_moe"
    refusals = {
        f"model_type {config.get('model_type')!r} (only 'qwen3' and 'qwen3_moe')": not sparse
        and config.get("model_type") != "qwen3",
        "layers with and without experts": sparse
        and (config.get("decoder_sparse_step", 1) != 1 or bool(config.get("mlp_only_layers"))),
        f"hidden_act {config.get('hidden_act')!r} (only 'silu')": config.get("hidden_act", "silu") != "silu",
        f"rope type {scaling!r} (only 'default')": scaling != "default",
        "attention_bias": bool(config.get("attention_bias")),
        "attention_dropout": bool(config.get("attention_dropout")),
        "sliding-window attention": bool(config.get("use_sliding_window")),
    }
    refused = [name for name, is_asked in refusals.items() if is_asked]
    if refused:
        raise UnsupportedPolicy(f"{policy_dir}: not supported by the trainer: {', '.join(refused)}")
    heads = int(config["num_attention_heads"])
    return PolicyShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config["moe_intermediate_size" if sparse else "intermediate_size"],
        vocab=config["vocab_size"],
        positions=config["max_position_embeddings"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=(config.get("num_experts") or config["num_local_experts"]) if sparse else 0,
        experts_per_token=config["num_experts_per_tok"] if sparse else 0,
        normalised_top_k=bool(config.get("norm_topk_prob", False)),
    )
