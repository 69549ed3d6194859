"""Recomputes a recorded step on one replica and compares the gradients: the proof that what was trained is on record.

A candidate whose gradient was recorded names its base version, its micro-steps and its loss; the gradient sum of all
of them, computed here by one replica in one process, must be the recorded one, whichever cells computed that in
whatever cut and order. Knows nothing of the cells that did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from infra.megatron.checkpoint import get_tensors, load_candidate, load_weights
from infra.megatron.replica import Replica
from infra.state.blobs import BlobStore
from trajectory.micro_step import MicroStep

FLOOR = 1e-3
"""A tensor's difference is relative to its own norm, or to this share of the whole gradient's norm if that is larger:
a tensor whose gradient is all but zero is made of rounding."""


@dataclass(frozen=True)
class ReplayResult:
    difference: float
    """L2 norm of (recomputed - recorded) over the whole gradient, relative to the recorded one's."""
    per_tensor: dict[str, float]
    """The same per tensor by Hugging Face name, with the floor ``FLOOR``."""
    worst: str
    """Name of the tensor that differs most."""
    normaliser: float
    micro_steps: int


def recompute_gradient(candidate_ref: str, blobs: BlobStore, policy_dir: Path) -> ReplayResult:
    """Replay the step that made a candidate. Raises ValueError when the candidate has no recorded gradient."""
    manifest = load_candidate(blobs, candidate_ref)
    if manifest.gradient_ref is None or manifest.base_ref is None or manifest.loss is None:
        raise ValueError(f"candidate {candidate_ref} (version {manifest.version}) has no recorded gradient")
    recorded = get_tensors(blobs, manifest.gradient_ref)
    base = load_candidate(blobs, manifest.base_ref)
    replica = Replica(policy_dir, loss=manifest.loss)
    replica.load(load_weights(blobs, base), base.version)
    replica.begin(manifest.step)
    for ref in manifest.micro_steps:
        replica.train(MicroStep.from_bytes(blobs.get(ref)))
    recomputed = replica.gradient()

    norms = {name: float(tensor.double().norm()) for name, tensor in recorded.items()}
    distances = {name: float((recomputed[name].double() - recorded[name].double()).norm()) for name in recorded}
    total = math.hypot(*norms.values())
    per_tensor = {name: _relative(distances[name], max(norms[name], FLOOR * total)) for name in recorded}
    return ReplayResult(
        difference=_relative(math.hypot(*distances.values()), total),
        per_tensor=per_tensor,
        worst=max(per_tensor, key=per_tensor.__getitem__),
        normaliser=manifest.normaliser,
        micro_steps=len(manifest.micro_steps),
    )


def _relative(distance: float, scale: float) -> float:
    if distance == 0.0:
        return 0.0
    return distance / scale if scale > 0 else math.inf
