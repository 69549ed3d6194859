"""Candidates: a weight version and its optimizer state in the blob store, with everything needed to redo the update.

Invariant: the manifest is put last, so a candidate whose reference can be read is complete; and it is content, so it
never changes. Which candidate is *the* version is decided elsewhere (the one recorded in the step's history): a
candidate by itself commits nothing. Tensors go by Hugging Face name as safetensors bytes, fp32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import safe_open
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from infra.state.blobs import BlobStore
from infra.transfer.manifest import checksum
from trajectory.config import LossConfig, OptimizerConfig


class CandidateFacts(BaseModel):
    """How a weight version came about. The defaults are those of version 0, which no update made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    step: int = -1
    """The step whose update made it."""
    version: int = 0
    base_version: int = -1
    """Version that the gradient was taken at."""
    base_ref: str | None = None
    """Candidate of the base version."""
    micro_steps: tuple[str, ...] = ()
    """References of all micro-steps of the step, in the step's order."""
    claims: dict[str, tuple[str, ...]] = {}
    """Incarnation -> micro-steps whose gradient it summed, in the order in which it did."""
    normaliser: float = 1.0
    """N: what the gradient sum was divided by."""
    grad_norm: float = 0.0
    """L2 norm of the gradient after division, before clipping; 0.0 when there was none and no optimizer step."""
    optimizer: OptimizerConfig | None = None
    loss: LossConfig | None = None


class CandidateManifest(CandidateFacts):
    """A complete candidate. Its reference is that of its JSON."""

    weights_ref: str
    checksum: str
    """``infra.transfer`` checksum of the weights: identifies them wherever they come from."""
    optimizer_ref: str | None
    """Optimizer state; None when there is none (before the first update, or SGD)."""
    gradient_ref: str | None
    """The gradient sum of all replicas before division, when it was recorded."""


def save_candidate(
    blobs: BlobStore,
    facts: CandidateFacts,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    gradient: Mapping[str, Tensor] | None = None,
) -> str:
    """Put a candidate, its manifest last; returns the manifest's reference. Idempotent."""
    manifest = CandidateManifest(
        **facts.model_dump(),
        weights_ref=put_tensors(blobs, weights),
        checksum=checksum(weights),
        optimizer_ref=put_tensors(blobs, optimizer) if optimizer else None,
        gradient_ref=put_tensors(blobs, gradient) if gradient is not None else None,
    )
    return blobs.put(manifest.model_dump_json().encode())


def load_candidate(blobs: BlobStore, ref: str) -> CandidateManifest:
    """The manifest of a candidate. Raises BlobMissing, and ValueError when the blob is not a manifest."""
    return CandidateManifest.model_validate_json(blobs.get(ref))


def load_weights(blobs: BlobStore, manifest: CandidateManifest) -> dict[str, Tensor]:
    """fp32 weights by Hugging Face name. Raises ValueError when they are not those of the manifest."""
    weights = get_tensors(blobs, manifest.weights_ref)
    if checksum(weights) != manifest.checksum:
        raise ValueError(f"the weights of version {manifest.version} of run {manifest.run} have another checksum")
    return weights


def load_optimizer(blobs: BlobStore, manifest: CandidateManifest) -> dict[str, Tensor]:
    """Optimizer state, empty when there is none."""
    return get_tensors(blobs, manifest.optimizer_ref) if manifest.optimizer_ref else {}


def initial_candidate(blobs: BlobStore, run: str, policy_dir: Path) -> str:
    """Put version 0, the policy as it is in a Hugging Face folder, and return its reference. Idempotent."""
    return save_candidate(blobs, CandidateFacts(run=run), read_policy(policy_dir), {})


def read_policy(policy_dir: Path) -> dict[str, Tensor]:
    """fp32 weights in a Hugging Face folder's safetensors files; a tied output layer that is stored is left out.

    Raises FileNotFoundError when the folder has none.
    """
    files = sorted(policy_dir.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors file in {policy_dir}")
    tied = bool(json.loads((policy_dir / "config.json").read_text()).get("tie_word_embeddings", False))
    weights: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                if not (tied and name == "lm_head.weight"):
                    weights[name] = stored.get_tensor(name).to(torch.float32)
    return weights


def put_tensors(blobs: BlobStore, tensors: Mapping[str, Tensor]) -> str:
    """Tensors as one safetensors blob."""
    return blobs.put(save_safetensors({name: tensor.contiguous() for name, tensor in tensors.items()}))


def get_tensors(blobs: BlobStore, ref: str) -> dict[str, Tensor]:
    """The inverse of ``put_tensors``."""
    return dict(load_safetensors(blobs.get(ref)))
