"""What a run decides about the optimizer of its policy. Plain data: imports nothing of torch or Megatron."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class OptimizerConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["adamw", "sgd"] = "adamw"

    lr: float = Field(default=1e-6, ge=0)
    """Learning rate, constant over the run."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW: decay of the first and second moment."""

    eps: float = Field(default=1e-8, gt=0)
    """AdamW: added to the root of the second moment."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled for AdamW, L2 for SGD. One-dimensional parameters (norms) are never decayed."""

    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global L2 norm of the gradient after division by N; 0 clips nothing."""
