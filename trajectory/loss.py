"""The sequence-level policy loss of one micro-step (GSPO, arXiv:2507.18071, per trajectory of an episode's tree).

Invariant: the loss is a plain sum over trajectories with factors fixed beforehand, so neither it nor its gradient
depends on how trajectories were cut into micro-steps; 1/N is applied once, at the update.

This knows log-probs of tokens. It does not know models, layouts, or how a log-prob was computed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from trajectory.loss_config import LossConfig
from trajectory.micro_step import MicroStep

__all__ = ["LossBatch", "LossConfig", "LossStats", "gspo_loss"]


@dataclass(frozen=True, eq=False)
class LossBatch:
    """The targets of a micro-step of n tokens, t targets and s trajectories, on one device."""

    tokens: int
    """n."""
    positions: Tensor
    """int64[t]: where the targets are among the n tokens, by trajectory."""
    behaviour: Tensor
    """float32[t]: behaviour log-probability of each target."""
    lengths: tuple[int, ...]
    """Targets of each of the s trajectories, |T_τ|; they sum to t."""
    advantage: Tensor
    """float64[s]."""
    weight: Tensor
    """float64[s]."""

    @classmethod
    def from_micro_step(cls, micro_step: MicroStep, device: torch.device | str) -> LossBatch:
        positions = np.flatnonzero(micro_step.target)
        lengths = np.add.reduceat(micro_step.target, micro_step.cu_seqlens[:-1], dtype=np.int64)
        return cls(
            tokens=micro_step.tokens,
            positions=torch.from_numpy(positions).to(device),
            behaviour=torch.from_numpy(micro_step.behaviour[positions]).to(device),
            lengths=tuple(lengths.tolist()),
            advantage=torch.from_numpy(micro_step.advantage.copy()).to(device),
            weight=torch.from_numpy(micro_step.weight.copy()).to(device),
        )


@dataclass(frozen=True)
class LossStats:
    """Of one micro-step, or of several: ``a + b`` adds counts and sums and takes the larger of the maxima."""

    trajectories: int = 0
    targets: int = 0
    positive: int = 0
    """Trajectories with a positive advantage."""
    negative: int = 0
    """Trajectories with a negative advantage."""
    clipped_positive: int = 0
    """Of ``positive``: above 1 + epsilon_high, so without gradient."""
    clipped_negative: int = 0
    """Of ``negative``: below 1 − epsilon_low, so without gradient."""
    truncated: int = 0
    """Trajectories whose w_τ was cut at C."""
    sum_abs_delta: float = 0.0
    """Σ over targets of |log π_θ − log π_behaviour|, nats."""
    max_token_delta: float = 0.0
    """Largest |log π_θ − log π_behaviour| of a target, nats."""
    max_sequence_log_ratio: float = 0.0
    """Largest |mean over T_τ of (log π_θ − log π_behaviour)| of a trajectory, nats per token."""

    def __add__(self, other: LossStats) -> LossStats:
        joined = {}
        for field in fields(self):
            one, two = getattr(self, field.name), getattr(other, field.name)
            joined[field.name] = max(one, two) if field.name.startswith("max_") else one + two
        return LossStats(**joined)


def gspo_loss(logp: Tensor, batch: LossBatch, config: LossConfig) -> tuple[Tensor, LossStats]:
    """Σ_τ weight_τ · ℓ_τ over the micro-step's trajectories, a scalar in ``logp``'s dtype (float32 or float64).

    ``logp`` [n]: log π_θ(ids[i] | the tokens before i in its trajectory) at the temperature that sampled token i;
    values where nothing is a target are ignored and get no gradient, whatever they are.

        s_τ = exp(mean over T_τ of (log π_θ − log π_old)),   ℓ_τ = −w_τ · min(s_τ Â, clip(s_τ, 1−ε_low, 1+ε_high) Â)

    Raises ValueError when ``logp`` doesn't have one floating value per token.
    """
    if logp.shape != (batch.tokens,) or logp.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"log-probs are {logp.dtype}{list(logp.shape)}, not float32 or float64 [{batch.tokens}]")
    current = logp[batch.positions]
    advantage, weight = batch.advantage.to(logp.dtype), batch.weight.to(logp.dtype)
    delta = current.detach() - batch.behaviour.to(logp.dtype)
    log_ratio = _means(delta, batch.lengths)
    if config.old == "proximal":
        s = _means(current - current.detach(), batch.lengths).exp()
        w = log_ratio.exp().clamp(max=config.truncation)
        truncated = log_ratio.exp() > config.truncation
    else:
        s = _means(current - batch.behaviour.to(logp.dtype), batch.lengths).exp()
        w = torch.ones_like(log_ratio)
        truncated = torch.zeros_like(log_ratio, dtype=torch.bool)
    low, high = 1 - config.epsilon_low, 1 + config.epsilon_high
    objective = torch.minimum(s * advantage, s.clamp(low, high) * advantage)
    loss = -(weight * w * objective).sum()
    return loss, _stats(batch, config, delta=delta, log_ratio=log_ratio, s=s.detach(), truncated=truncated)


def _means(values: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """[s]: mean of each trajectory's run of values. Run by run: the same bits whatever else is in the micro-step."""
    return torch.stack([run.mean() for run in values.split(lengths)])


def _stats(
    batch: LossBatch, config: LossConfig, *, delta: Tensor, log_ratio: Tensor, s: Tensor, truncated: Tensor
) -> LossStats:
    positive, negative = batch.advantage > 0, batch.advantage < 0
    counts = [
        positive.sum(),
        negative.sum(),
        (positive & (s > 1 + config.epsilon_high)).sum(),
        (negative & (s < 1 - config.epsilon_low)).sum(),
        truncated.sum(),
        delta.abs().sum(),
        delta.abs().max(),
        log_ratio.abs().max(),
    ]
    # one transfer for all: each would wait for the device
    values = torch.stack([value.to(torch.float64) for value in counts]).tolist()
    plus, minus, clipped_plus, clipped_minus, cut = (int(value) for value in values[:5])
    return LossStats(
        trajectories=len(batch.lengths),
        targets=len(batch.positions),
        positive=plus,
        negative=minus,
        clipped_positive=clipped_plus,
        clipped_negative=clipped_minus,
        truncated=cut,
        sum_abs_delta=values[5],
        max_token_delta=values[6],
        max_sequence_log_ratio=values[7],
    )
