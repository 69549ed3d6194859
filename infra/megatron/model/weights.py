"""Hugging Face names and Megatron parameters: one table that is read in both directions.

Each row names one Hugging Face tensor and the *view* of the Megatron parameter that holds the same numbers, so
exporting, importing and adding are the same walk over the table and cannot disagree. Hugging Face names are gyre's
global names for weights, gradients and optimizer state: they don't depend on the trainer's layout. A rank's table
lists all tensors of the policy, with the part of each that this rank has; what other ranks have of a tensor is
fetched by ``gathered_tensors``, a collective call. It knows nothing of files or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from infra.megatron.model.layout import RankPlace, expert_group, pipeline_group, tensor_group
from infra.megatron.model.shape import PolicyShape

ALONE: Final = RankPlace.alone()


class WeightsError(ValueError):
    """A set of named tensors is not one of this policy: a name is missing or unknown, or a shape differs."""


@dataclass(frozen=True)
class Row:
    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    """Shape of the whole Hugging Face tensor."""
    parameter: str
    """Megatron name of the parameter that holds it, on the ranks that do."""
    view: Callable[[Tensor], Tensor]
    """View of a tensor of the parameter's shape: the elements of this rank's part in the same order."""
    split: int | None = None
    """Dimension of the Hugging Face tensor that is cut between tensor-parallel ranks, in their order."""
    stage: int = 0
    """Pipeline stage that has it."""
    expert_rank: int | None = None
    """For a tensor of an expert: the expert-parallel rank that has it."""
    copy: bool = False
    """A second place of an earlier row's tensor: written like the first, never read."""

    def is_on(self, place: RankPlace) -> bool:
        return self.stage == place.pp and self.expert_rank in (None, place.ep)

    def part_shape(self, place: RankPlace) -> tuple[int, ...]:
        """Shape of what a rank has of the Hugging Face tensor."""
        return tuple(
            size // place.layout.tp if dimension == self.split else size for dimension, size in enumerate(self.shape)
        )

    def part(self, whole: Tensor, place: RankPlace) -> Tensor:
        """What a rank has of a whole Hugging Face tensor."""
        return whole if self.split is None else whole.chunk(place.layout.tp, self.split)[place.tp]


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def table(shape: PolicyShape, parameters: set[str], place: RankPlace = ALONE) -> list[Row]:
    """Rows for a policy, in Hugging Face order. ``parameters`` (Megatron's names) tells which layer spec was built.

    Raises WeightsError when the rows on this rank do not cover exactly these parameters.
    """
    embedding = (shape.vocab, shape.hidden)
    last = place.layout.pp - 1
    rows = [Row("model.embed_tokens.weight", embedding, "embedding.word_embeddings.weight", _whole, split=0)]
    per_stage = shape.layers // place.layout.pp
    for layer in range(shape.layers):
        stage, local = divmod(layer, per_stage)
        here = [*_layer(shape, f"model.layers.{layer}", f"decoder.layers.{local}", parameters, place)]
        rows += [replace(row, stage=stage) for row in here]
    rows.append(Row("model.norm.weight", (shape.hidden,), "decoder.final_layernorm.weight", _whole, stage=last))
    if not shape.tied:
        rows.append(Row("lm_head.weight", embedding, "output_layer.weight", _whole, split=0, stage=last))
    elif last > 0:  # a tied output layer on another stage is a parameter of its own
        rows.append(replace(rows[0], parameter="output_layer.weight", stage=last, copy=True))
    covered = {row.parameter for row in rows if row.is_on(place)}
    if covered != parameters:
        raise WeightsError(f"parameters without a Hugging Face name, or the reverse: {sorted(covered ^ parameters)}")
    return rows


def _layer(shape: PolicyShape, hf: str, mc: str, parameters: set[str], place: RankPlace) -> Iterator[Row]:
    hidden, width = shape.hidden, shape.head_dim
    groups, per_group = shape.groups // place.layout.tp, shape.heads // shape.groups
    qkv = f"{mc}.self_attention.linear_qkv"

    def in_qkv(index: int | slice) -> Callable[[Tensor], Tensor]:
        # per key/value group: its queries, then its key, then its value
        return lambda tensor: tensor.view(groups, per_group + 2, width, hidden)[:, index]

    def norm(own: str, fused: str) -> str:  # Transformer Engine keeps a norm's weight in the linear that follows it
        return own if own in parameters else fused

    input_norm = norm(f"{mc}.input_layernorm.weight", f"{qkv}.layer_norm_weight")
    mlp_norm = norm(f"{mc}.pre_mlp_layernorm.weight", f"{mc}.mlp.linear_fc1.layer_norm_weight")
    queries, keys = (shape.heads * width, hidden), (shape.groups * width, hidden)
    attention = f"{mc}.self_attention"
    yield Row(f"{hf}.input_layernorm.weight", (hidden,), input_norm, _whole)
    yield Row(f"{hf}.self_attn.q_proj.weight", queries, f"{qkv}.weight", in_qkv(slice(0, per_group)), split=0)
    yield Row(f"{hf}.self_attn.k_proj.weight", keys, f"{qkv}.weight", in_qkv(per_group), split=0)
    yield Row(f"{hf}.self_attn.v_proj.weight", keys, f"{qkv}.weight", in_qkv(per_group + 1), split=0)
    for which in ("q", "k"):
        yield Row(f"{hf}.self_attn.{which}_norm.weight", (width,), f"{attention}.{which}_layernorm.weight", _whole)
    yield Row(f"{hf}.self_attn.o_proj.weight", queries[::-1], f"{attention}.linear_proj.weight", _whole, split=1)
    yield Row(f"{hf}.post_attention_layernorm.weight", (hidden,), mlp_norm, _whole)
    if not shape.experts:
        yield from _feed_forward(shape, f"{hf}.mlp", f"{mc}.mlp", place)
        return
    yield Row(f"{hf}.mlp.gate.weight", (shape.experts, hidden), f"{mc}.mlp.router.weight", _whole)
    per_rank = shape.experts // place.layout.ep
    for expert in range(shape.experts):
        rank, local = divmod(expert, per_rank)
        for row in _feed_forward(shape, f"{hf}.mlp.experts.{expert}", f"{mc}.mlp.experts.local_experts.{local}", place):
            yield replace(row, expert_rank=rank)


def _feed_forward(shape: PolicyShape, hf: str, mc: str, place: RankPlace) -> Iterator[Row]:
    hidden, ffn, here = shape.hidden, shape.ffn, shape.ffn // place.layout.tp
    into = (ffn, hidden)

    def in_fc1(index: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: tensor.view(2, here, hidden)[index]

    yield Row(f"{hf}.gate_proj.weight", into, f"{mc}.linear_fc1.weight", in_fc1(0), split=0)
    yield Row(f"{hf}.up_proj.weight", into, f"{mc}.linear_fc1.weight", in_fc1(1), split=0)
    yield Row(f"{hf}.down_proj.weight", into[::-1], f"{mc}.linear_fc2.weight", _whole, split=1)


def named_tensors(
    rows: list[Row], tensors: Mapping[str, Tensor], place: RankPlace = ALONE
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, this rank's part of the tensor) from this rank's tensors by Megatron's name.

    Each is given by the ranks that hold its first place. Shares memory where layouts allow.
    """
    for row in rows:
        if row.is_on(place) and not row.copy:
            yield row.name, row.view(tensors[row.parameter]).reshape(row.part_shape(place))


def gathered_tensors(
    rows: list[Row], tensors: Mapping[str, Tensor], place: RankPlace = ALONE
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) on every rank. Collective: all ranks must walk through all of it."""
    if place.layout.tp == place.layout.pp == place.layout.ep == 1:
        yield from named_tensors(rows, tensors)
        return
    like = next(iter(tensors.values()))
    parts = dict(named_tensors(rows, tensors, place))
    for row in rows:
        if not row.copy:
            whole = _over_tensor_ranks(row, parts[row.name], place) if row.name in parts else None
            if whole is None:
                whole = torch.empty(row.shape, dtype=like.dtype, device=like.device)
            if row.expert_rank is not None and place.layout.ep > 1 and row.stage == place.pp:
                dist.broadcast(whole, group=expert_group(), group_src=row.expert_rank)
            if place.layout.pp > 1:
                dist.broadcast(whole, group=pipeline_group(), group_src=row.stage)
            yield row.name, whole


def _over_tensor_ranks(row: Row, part: Tensor, place: RankPlace) -> Tensor:
    """A whole tensor that is contiguous and nobody else's memory."""
    if row.split is None or place.layout.tp == 1:
        return part.clone(memory_format=torch.contiguous_format)
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(place.layout.tp)]
    dist.all_gather(parts, part.contiguous(), group=tensor_group())
    return torch.cat(parts, row.split)


def square_sum(rows: list[Row], tensors: Mapping[str, Tensor], place: RankPlace) -> float:
    """Σ of squares over all tensors of the policy, each counted once. Collective.

    ``tensors``: what ``gathered_tensors`` takes.
    """
    total = torch.zeros(2, dtype=torch.float64)
    for row in rows:
        if row.is_on(place) and not row.copy and (row.split is not None or place.tp == 0):
            of_expert = int(row.expert_rank is not None)
            total[of_expert] += float(row.view(tensors[row.parameter]).double().square().sum())
    if place.layout.ep > 1:
        of_experts = total[1:].clone()
        dist.all_reduce(of_experts, group=expert_group())
        total[1:] = of_experts
    for group, ranks in ((tensor_group, place.layout.tp), (pipeline_group, place.layout.pp)):
        if ranks > 1:
            dist.all_reduce(total, group=group())
    return float(total.sum())


def check(rows: list[Row], named: Mapping[str, Tensor]) -> None:
    """Raises WeightsError unless ``named`` has exactly the table's names and shapes."""
    expected = {row.name for row in rows}
    if named.keys() != expected:
        missing, unknown = sorted(expected - named.keys()), sorted(named.keys() - expected)
        raise WeightsError(f"not this policy's tensors: missing {missing[:4]}, unknown {unknown[:4]}")
    for row in rows:
        if tuple(named[row.name].shape) != row.shape:
            raise WeightsError(f"{row.name}: shape {tuple(named[row.name].shape)}, expected {row.shape}")


def copy_into(
    rows: list[Row], named: Mapping[str, Tensor], tensors: Mapping[str, Tensor], place: RankPlace = ALONE
) -> None:
    """Write whole tensors by Hugging Face name into this rank's by Megatron's name.

    Raises WeightsError before any write.
    """
    for part, view in _pairs(rows, named, tensors, place):
        view.copy_(part)


def add_into(
    rows: list[Row], named: Mapping[str, Tensor], tensors: Mapping[str, Tensor], place: RankPlace = ALONE
) -> None:
    """Like ``copy_into``, but adds."""
    for part, view in _pairs(rows, named, tensors, place):
        view.add_(part.to(device=view.device, dtype=view.dtype))


def _pairs(
    rows: list[Row], named: Mapping[str, Tensor], tensors: Mapping[str, Any], place: RankPlace
) -> Iterator[tuple[Tensor, Tensor]]:
    """(this rank's part of a named tensor, the view that holds it), of one shape."""
    check(rows, named)
    for row in rows:
        if row.is_on(place):
            view = row.view(tensors[row.parameter])
            yield row.part(named[row.name], place).reshape(view.shape), view
