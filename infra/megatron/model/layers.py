# mypy: disallow-subclassing-any=False
"""The RMS norm that Megatron's local layer spec lacks, and the spec with it and gyre's core attention in place.

Used on CPU; with CUDA the Transformer Engine spec takes their place.
"""

from __future__ import annotations

from typing import Any

import torch

from infra.megatron.model.attention import TorchCoreAttention  # which installs the shim

from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip


class TorchRMSNorm(torch.nn.RMSNorm):
    """torch's RMS norm with the constructor that Megatron's specs call and the mark that sequence parallelism reads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


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
