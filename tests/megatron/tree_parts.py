"""Random micro-steps whose trajectories share prefixes, attention in its plainest form, distances of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from infra.megatron.model import attention
from infra.megatron.model.pack import NOTHING, Pack, Runs
from trajectory.micro_step import MicroStep

VOCAB = 160
FLOOR = 1e-3
"""A tensor's difference is relative to its own norm, or to this share of the whole gradient's if that is larger."""


def tree_mask(runs: Runs) -> npt.NDArray[np.bool_]:
    """bool[n, n]: whether a token (row) sees another. From the predecessors alone, for one rank."""
    mask = np.eye(runs.tokens, dtype=np.bool_)
    for token, before in enumerate(runs.predecessors.tolist()):
        if before != NOTHING:
            mask[token] |= mask[before]
    return mask


class DenseAttention:
    """torch's own attention by one dense mask: the slow, plain form that the pieces of a pack are compared with."""

    @staticmethod
    def apply(query: Tensor, key: Tensor, value: Tensor, how: tuple[Pack, float | None]) -> Tensor:
        pack, scale = how
        mask = torch.from_numpy(tree_mask(pack.runs))
        tensors = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


def attending(dense: bool) -> AbstractContextManager[object]:
    """Within it attention is by a dense mask, or as it is."""
    return patch.object(attention, "_Attend", DenseAttention) if dense else nullcontext()


def random_tree(seed: int, trajectories: int = 7, longest: int = 24) -> MicroStep:
    """Trajectories that begin anew or go on from anywhere in an earlier one, also in what that one shares."""
    random = np.random.default_rng(seed)
    prefix_of, prefix_len, own, episode = [], [], [], []
    for number in range(trajectories):
        parent = int(random.integers(0, number)) if number and random.random() < 0.8 else -1
        whole = prefix_len[parent] + own[parent] if parent >= 0 else 0
        prefix_of.append(parent)
        prefix_len.append(int(random.choice([whole, random.integers(1, whole + 1)])) if parent >= 0 else 0)
        own.append(int(random.integers(1 if parent >= 0 else 2, longest)))
        episode.append(episode[parent] if parent >= 0 else max(episode, default=-1) + 1)
    ends = np.cumsum([0, *own]).astype(np.int32)
    n = int(ends[-1])
    target = random.random(n) > 0.5
    target[ends[:-1]] = [length > 0 and random.random() > 0.3 for length in prefix_len]
    target[ends[1:] - 1] = True
    only_targets = np.where(target, 0, -1).astype(np.int32)
    return MicroStep(
        ids=random.integers(0, VOCAB, n).astype(np.int32),
        cu_seqlens=ends,
        prefix_of=np.array(prefix_of, np.int32),
        prefix_len=np.array(prefix_len, np.int32),
        target=target,
        behaviour=np.where(target, -5 + random.standard_normal(n), 0).astype(np.float32),
        temperature=np.where(target, random.choice([0.8, 1.0], n), 1).astype(np.float32),
        version=only_targets,
        call=only_targets,
        offset=only_targets,
        advantage=random.standard_normal(trajectories),
        weight=random.uniform(0.2, 1, trajectories),
        episode_index=np.array(episode, np.int32),
        episodes=tuple(f"e{i}" for i in range(max(episode) + 1)),
        kinds=("main",) * trajectories,
    )


def distance(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> float:
    """The largest relative difference of a tensor, with the floor."""
    assert one.keys() == two.keys()
    norms = {name: float(tensor.double().norm()) for name, tensor in one.items()}
    total = math.hypot(*norms.values())
    apart = {name: float((one[name].double() - two[name].double()).norm()) for name in one}
    return max(apart[name] / max(norms[name], FLOOR * total) for name in one)
