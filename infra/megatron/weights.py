"""Hugging Face names and Megatron parameters: one table that is read in both directions.

Each row names one Hugging Face tensor and the *view* of the Megatron parameter that holds the same numbers, so
exporting, importing and adding are the same walk over the table and cannot disagree. Hugging Face names are gyre's
global names for weights, gradients and optimizer state: they don't depend on the trainer's layout. The table is for a
cell of one rank. It knows nothing of files, processes or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from infra.megatron.shape import PolicyShape


class WeightsError(ValueError):
    """A set of named tensors is not one of this policy: a name is missing or unknown, or a shape differs."""


@dataclass(frozen=True)
class Row:
    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    """Shape of the Hugging Face tensor."""
    parameter: str
    """Megatron name of the parameter that holds it."""
    view: Callable[[Tensor], Tensor]
    """View of a tensor of the parameter's shape: the elements of the Hugging Face tensor in the same order."""


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def table(shape: PolicyShape, parameters: set[str]) -> list[Row]:
    """Rows for a policy, in Hugging Face order. ``parameters`` (Megatron's names) tells which layer spec was built.

    Raises WeightsError when the rows do not cover exactly these parameters.
    """
    rows = [Row("model.embed_tokens.weight", (shape.vocab, shape.hidden), "embedding.word_embeddings.weight", _whole)]
    for layer in range(shape.layers):
        rows += _layer(shape, f"model.layers.{layer}", f"decoder.layers.{layer}", parameters)
    rows.append(Row("model.norm.weight", (shape.hidden,), "decoder.final_layernorm.weight", _whole))
    if not shape.tied:
        rows.append(Row("lm_head.weight", (shape.vocab, shape.hidden), "output_layer.weight", _whole))
    covered = {row.parameter for row in rows}
    if covered != parameters:
        raise WeightsError(f"parameters without a Hugging Face name, or the reverse: {sorted(covered ^ parameters)}")
    return rows


def _layer(shape: PolicyShape, hf: str, mc: str, parameters: set[str]) -> Iterator[Row]:
    hidden, width, ffn, groups = shape.hidden, shape.head_dim, shape.ffn, shape.groups
    per_group = shape.heads // groups
    qkv, fc1 = f"{mc}.self_attention.linear_qkv", f"{mc}.mlp.linear_fc1"

    def in_qkv(index: int | slice) -> Callable[[Tensor], Tensor]:
        # per key/value group: its queries, then its key, then its value
        return lambda tensor: tensor.view(groups, per_group + 2, width, hidden)[:, index]

    def in_fc1(index: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: tensor.view(2, ffn, hidden)[index]

    def norm(own: str, fused: str) -> str:  # Transformer Engine keeps a norm's weight in the linear that follows it
        return own if own in parameters else fused

    input_norm = norm(f"{mc}.input_layernorm.weight", f"{qkv}.layer_norm_weight")
    mlp_norm = norm(f"{mc}.pre_mlp_layernorm.weight", f"{fc1}.layer_norm_weight")
    yield Row(f"{hf}.input_layernorm.weight", (hidden,), input_norm, _whole)
    yield Row(
        f"{hf}.self_attn.q_proj.weight",
        (shape.heads * width, hidden),
        f"{qkv}.weight",
        in_qkv(slice(0, per_group)),
    )
    yield Row(f"{hf}.self_attn.k_proj.weight", (groups * width, hidden), f"{qkv}.weight", in_qkv(per_group))
    yield Row(f"{hf}.self_attn.v_proj.weight", (groups * width, hidden), f"{qkv}.weight", in_qkv(per_group + 1))
    for which in ("q", "k"):
        yield Row(
            f"{hf}.self_attn.{which}_norm.weight", (width,), f"{mc}.self_attention.{which}_layernorm.weight", _whole
        )
    yield Row(
        f"{hf}.self_attn.o_proj.weight",
        (hidden, shape.heads * width),
        f"{mc}.self_attention.linear_proj.weight",
        _whole,
    )
    yield Row(f"{hf}.post_attention_layernorm.weight", (hidden,), mlp_norm, _whole)
    yield Row(f"{hf}.mlp.gate_proj.weight", (ffn, hidden), f"{fc1}.weight", in_fc1(0))
    yield Row(f"{hf}.mlp.up_proj.weight", (ffn, hidden), f"{fc1}.weight", in_fc1(1))
    yield Row(f"{hf}.mlp.down_proj.weight", (hidden, ffn), f"{mc}.mlp.linear_fc2.weight", _whole)


def named_tensors(rows: list[Row], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor of its shape) from tensors by Megatron's name; shares memory where layouts allow."""
    for row in rows:
        yield row.name, row.view(tensors[row.parameter]).reshape(row.shape)


def check(rows: list[Row], named: Mapping[str, Tensor]) -> None:
    """Raises WeightsError unless ``named`` has exactly the table's names and shapes."""
    expected = {row.name for row in rows}
    if named.keys() != expected:
        missing, unknown = sorted(expected - named.keys()), sorted(named.keys() - expected)
        raise WeightsError(f"not this policy's tensors: missing {missing[:4]}, unknown {unknown[:4]}")
    for row in rows:
        if tuple(named[row.name].shape) != row.shape:
            raise WeightsError(f"{row.name}: shape {tuple(named[row.name].shape)}, expected {row.shape}")


def copy_into(rows: list[Row], named: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by Hugging Face name into tensors by Megatron's name. Raises WeightsError before any write."""
    check(rows, named)
    for row in rows:
        view = row.view(tensors[row.parameter])
        view.copy_(named[row.name].reshape(view.shape))


def add_into(rows: list[Row], named: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Like ``copy_into``, but adds."""
    check(rows, named)
    for row in rows:
        view = row.view(tensors[row.parameter])
        view.add_(named[row.name].reshape(view.shape).to(device=view.device, dtype=view.dtype))
