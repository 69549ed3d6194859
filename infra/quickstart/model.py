"""The policy's architecture and its copy-friendly initialisation.

Invariant: a plain Qwen3 causal LM (any Qwen3 loader reads it); only the initial values are special. The tasks are
solved by copying names from the prompt and from tool outputs, and a stock initialisation (std 0.02) never learns to
copy within a minute of CPU: the embeddings have unit norm, so with tied weights a copied token gets a high logit at
once, and each attention head's output matrix is the transpose of its value matrix, so that a head passes on what it
reads.

It knows nothing of tokens or tasks.
"""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from infra.quickstart.recipe import QuickstartShape


def make_model(
    shape: QuickstartShape, *, vocabulary: int, end_of_turn: int, padding: int, seed: int
) -> Qwen3ForCausalLM:
    """A freshly initialised fp32 policy. Draws from a generator of its own: torch's global one isn't touched."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        max_position_embeddings=shape.positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=end_of_turn,
        pad_token_id=padding,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            _make_copy_friendly(model, shape)
    return model


def _make_copy_friendly(model: Qwen3ForCausalLM, shape: QuickstartShape) -> None:
    model.model.embed_tokens.weight.normal_(0.0, shape.hidden**-0.5)
    for layer in model.model.layers:
        rows = torch.linalg.qr(torch.randn(shape.hidden, shape.hidden))[0]
        layer.self_attn.v_proj.weight.copy_(rows)
        layer.self_attn.o_proj.weight.copy_(rows.T)
        layer.mlp.down_proj.weight.mul_(0.5)
