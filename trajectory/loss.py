"""The policy losses of one micro-step: the objectives by name, and the sum that is trained.

Invariant: the loss is a plain sum over trajectories with factors fixed beforehand, so neither it nor its gradient
depends on how trajectories were cut into micro-steps; 1/N is applied once, at the update.

To add a loss: a function from ``Targets`` to an ``Objective`` with its formula in its docstring, in ``LOSSES`` here,
and its name and clips in ``trajectory.config``; a package adds a ``Loss`` as entry point of ``gyre.losses``. This knows
log-probs of tokens. It does not know models, layouts, or how a log-prob was computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from trajectory.additive import EDGES
from trajectory.config import CLIPS, LOSS_NAMES, LossConfig
from trajectory.micro_step import MicroStep

Histogram = dict[str, int]
"""Bin of ``trajectory.additive`` -> count."""


@dataclass(frozen=True)
class LossStats:
    """Of one micro-step; as mappings, those of several add up (``trajectory.additive``).

    A unit is what has one ratio: a trajectory for ``gspo`` and ``gspo_token``, else a target token.
    """

    trajectories: int
    targets: int
    units: int
    positive: int
    """Units with a positive advantage."""
    negative: int
    """Units with a negative advantage."""
    clipped_positive: int
    """Of ``positive``: ratio above 1 + epsilon_high, so without gradient (``cispo``: with the bound's)."""
    clipped_negative: int
    """Of ``negative``: ratio below 1 − epsilon_low, so without gradient (``cispo``: with the bound's)."""
    outside_positive: int
    """Of ``positive``: would be above 1 + epsilon_high if π_old were the behaviour policy."""
    outside_negative: int
    """Of ``negative``: would be below 1 − epsilon_low if π_old were the behaviour policy."""
    truncated: int
    """Units whose w was cut at C."""
    sum_delta: float
    """Σ over targets of (log π_θ − log π_behaviour), nats."""
    sum_abs_delta: float
    """Σ over targets of |log π_θ − log π_behaviour|, nats."""
    max_token_delta: float
    """Largest |log π_θ − log π_behaviour| of a target, nats."""
    sum_abs_sequence_log_ratio: float
    """Σ over trajectories of |mean over T_τ of (log π_θ − log π_behaviour)|, nats per token."""
    max_sequence_log_ratio: float
    """Largest |mean over T_τ of (log π_θ − log π_behaviour)| of a trajectory, nats per token."""
    token_delta: Histogram
    """Of |log π_θ − log π_behaviour| over targets."""
    sequence_log_ratio: dict[str, Histogram]
    """Of |mean over T_τ of (log π_θ − log π_behaviour)| over trajectories, by the oldest weight version that sampled
    one of their targets (decimal)."""


@dataclass(frozen=True, eq=False)
class Targets:
    """What objectives are made of: log-probs of t targets under three policies, and advantages of s trajectories."""

    current: Tensor
    """[t]: log π_θ, the only one with a gradient."""
    old: Tensor
    """[t]: log π_old: sg(log π_θ) or log π_behaviour, as ``LossConfig.old`` says."""
    behaviour: Tensor
    """[t]: log π_behaviour."""
    lengths: tuple[int, ...]
    """|T_τ| of the s trajectories."""
    advantage: Tensor
    """[s]: Â."""
    low: float
    """1 − ε_low."""
    high: float
    """1 + ε_high."""

    @property
    def mismatch(self) -> Tensor:
        """[t]: sg(log π_θ) − log π_behaviour."""
        return self.current.detach() - self.behaviour

    def means(self, values: Tensor) -> Tensor:
        """[s]: mean of each trajectory's run of [t] values. Run by run: the same bits whatever else is in the
        micro-step."""
        return torch.stack([run.mean() for run in values.split(self.lengths)])

    def spread(self, values: Tensor) -> Tensor:
        """[t]: a trajectory's value of [s] for each of its targets."""
        repeats = torch.tensor(self.lengths, device=values.device)
        return values.repeat_interleave(repeats, output_size=len(self.current))

    def clipped(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """min(ratio Â, clip(ratio, 1−ε_low, 1+ε_high) Â)."""
        return torch.minimum(ratio * advantage, ratio.clamp(self.low, self.high) * advantage)


@dataclass(frozen=True, eq=False)
class Objective:
    """What a loss maximises, by trajectory [s] or by target [t]."""

    by_target: bool
    value: Tensor
    """J_τ or J_t, before the correction w."""
    ratio: Tensor
    """The importance ratio by trajectory [s] or target [t] that is clipped; no gradient needed."""
    mismatch: Tensor
    """Where there is a ratio: the log-ratio of π_θ to π_behaviour from which w is made."""


def gspo(t: Targets) -> Objective:
    """Group sequence policy optimisation (arXiv:2507.18071), one ratio for all that a trajectory owns.

    s_τ = exp(mean over T_τ of (log π_θ − log π_old))
    ℓ_τ = −w_τ · min(s_τ Â, clip(s_τ, 1−ε_low, 1+ε_high) Â),   w_τ = min(exp(mean over T_τ of the mismatch), C)
    """
    ratio = t.means(t.current - t.old).exp()
    return Objective(False, t.clipped(ratio, t.advantage), ratio, t.means(t.mismatch))


def gspo_token(t: Targets) -> Objective:
    """GSPO-token (arXiv:2507.18071, §4.3): the value and gradient of ``gspo``, written by token, so that advantages
    could differ between the tokens of a trajectory.

        s_t = sg(s_τ) · π_θ(t) / sg(π_θ(t))
        ℓ_τ = −w_τ · mean over T_τ of min(s_t Â, clip(s_t, 1−ε_low, 1+ε_high) Â),   s_τ and w_τ as for ``gspo``
    """
    ratio = t.means(t.current.detach() - t.old).exp()
    by_token = t.spread(ratio) * (t.current - t.current.detach()).exp()
    return Objective(True, t.clipped(by_token, t.spread(t.advantage)), ratio, t.means(t.mismatch))


def grpo(t: Targets) -> Objective:
    """GRPO (arXiv:2402.03300) without its KL term: a ratio by token.

    r_t = exp(log π_θ(t) − log π_old(t))
    ℓ_τ = −mean over T_τ of w_t · min(r_t Â, clip(r_t, 1−ε_low, 1+ε_high) Â),   w_t = min(exp(mismatch_t), C)
    """
    ratio = (t.current - t.old).exp()
    return Objective(True, t.clipped(ratio, t.spread(t.advantage)), ratio, t.mismatch)


def cispo(t: Targets) -> Objective:
    """CISPO (arXiv:2506.13585): the importance weight is clipped and detached, so no token loses its gradient.

    r_t = exp(log π_θ(t) − log π_old(t))
    ℓ_τ = −mean over T_τ of w_t · sg(clip(r_t, 1−ε_low, 1+ε_high)) · Â · log π_θ(t),   w_t = min(exp(mismatch_t), C)
    """
    ratio = (t.current.detach() - t.old).exp()
    return Objective(True, ratio.clamp(t.low, t.high) * t.spread(t.advantage) * t.current, ratio, t.mismatch)


@dataclass(frozen=True)
class Loss:
    objective: Callable[[Targets], Objective]
    epsilon_low: float
    """Of the clips where a configuration names none; the same for ``epsilon_high``."""
    epsilon_high: float


LOSSES: Final[dict[str, Loss]] = {
    objective.__name__: Loss(objective, *CLIPS[objective.__name__]) for objective in (gspo, gspo_token, grpo, cispo)
}
"""gyre's own, by name."""


@cache
def loss_named(name: str) -> Loss:
    """One of gyre's own, or an installed package's. Raises PluginError when that is no ``Loss``."""
    if name in LOSSES:
        return LOSSES[name]
    loss = LOSS_NAMES.load(name)
    if not isinstance(loss, Loss):
        raise LOSS_NAMES.unusable(name, f"it is a {type(loss).__name__}, not a trajectory.loss.Loss")
    return loss


def policy_loss(logp: Tensor, micro_step: MicroStep, config: LossConfig) -> tuple[Tensor, LossStats]:
    """Σ_τ weight_τ · ℓ_τ over the micro-step's trajectories, a scalar in ``logp``'s dtype (float32 or float64).

    ``logp`` [n]: log π_θ(ids[i] | the tokens before i in its trajectory) at the temperature that sampled token i;
    values where nothing is a target are ignored and get no gradient, whatever they are. ℓ_τ is that of
    ``loss_named(config.loss)``, where π_old and w are

        old = proximal:   π_old = sg(π_θ),        w = min(exp(log-ratio of sg(π_θ) to π_behaviour), C)
        old = behaviour:  π_old = π_behaviour,    w = 1

    Raises ValueError when ``logp`` doesn't have one floating value per token.
    """
    if logp.shape != (micro_step.tokens,) or logp.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"log-probs are {logp.dtype}{list(logp.shape)}, not float32 or float64 [{micro_step.tokens}]")
    loss = loss_named(config.loss)
    positions = np.flatnonzero(micro_step.target)
    behaviour = torch.tensor(micro_step.behaviour[positions]).to(logp)
    current = logp[torch.tensor(positions, device=logp.device)]
    targets = Targets(
        current=current,
        old=current.detach() if config.old == "proximal" else behaviour,
        behaviour=behaviour,
        lengths=tuple(np.add.reduceat(micro_step.target, micro_step.cu_seqlens[:-1], dtype=np.int64).tolist()),
        advantage=torch.tensor(micro_step.advantage).to(logp),
        low=1 - (config.epsilon_low or loss.epsilon_low),
        high=1 + (config.epsilon_high or loss.epsilon_high),
    )
    objective = loss.objective(targets)
    correction, truncated = _correction(objective.mismatch, config)
    if objective.by_target:
        by_target = correction if len(correction) == len(current) else targets.spread(correction)
        by_trajectory = targets.means(by_target * objective.value)
    else:
        by_trajectory = correction * objective.value
    value = -(torch.tensor(micro_step.weight).to(logp) * by_trajectory).sum()
    return value, _stats(targets, objective, truncated, micro_step)


def _correction(mismatch: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """w, and where it was cut at C."""
    if config.old == "behaviour":
        return torch.ones_like(mismatch), torch.zeros_like(mismatch, dtype=torch.bool)
    w = mismatch.exp()
    bound = torch.inf if config.truncation is None else config.truncation
    return w.clamp(max=bound), w > bound


def _stats(targets: Targets, objective: Objective, truncated: Tensor, micro_step: MicroStep) -> LossStats:
    mismatch, sequence = targets.mismatch, targets.means(targets.mismatch)
    ratio, behaviour_ratio = objective.ratio.detach(), objective.mismatch.exp()
    advantage = targets.spread(targets.advantage) if len(ratio) == len(mismatch) else targets.advantage
    positive, negative = advantage > 0, advantage < 0
    scalars = {
        "positive": positive.sum(),
        "negative": negative.sum(),
        "clipped_positive": (positive & (ratio > targets.high)).sum(),
        "clipped_negative": (negative & (ratio < targets.low)).sum(),
        "outside_positive": (positive & (behaviour_ratio > targets.high)).sum(),
        "outside_negative": (negative & (behaviour_ratio < targets.low)).sum(),
        "truncated": truncated.sum(),
        "sum_delta": mismatch.sum(),
        "sum_abs_delta": mismatch.abs().sum(),
        "max_token_delta": mismatch.abs().max(),
        "sum_abs_sequence_log_ratio": sequence.abs().sum(),
        "max_sequence_log_ratio": sequence.abs().max(),
    }
    edges = torch.tensor(EDGES, dtype=torch.float64, device=mismatch.device)
    token_bins, sequence_bins = (torch.bucketize(values.abs().double(), edges) for values in (mismatch, sequence))
    parts = [
        torch.stack([value.double() for value in scalars.values()]),
        torch.bincount(token_bins, minlength=len(edges) + 1).double(),
        sequence_bins.double(),
    ]
    # one transfer for all: each would wait for the device
    numbers, histogram, places = (part.tolist() for part in torch.cat(parts).cpu().split([*map(len, parts)]))
    by_name: dict[str, Any] = {
        name: number if value.is_floating_point() else int(number)
        for (name, value), number in zip(scalars.items(), numbers, strict=True)
    }
    versions = np.where(micro_step.target, micro_step.version, np.iinfo(np.int32).max)
    oldest = np.minimum.reduceat(versions, micro_step.cu_seqlens[:-1]).tolist()
    by_version: dict[str, Histogram] = {}
    for version, place in zip(oldest, places, strict=True):
        bins = by_version.setdefault(str(version), {})
        bins[str(int(place))] = bins.get(str(int(place)), 0) + 1
    return LossStats(
        trajectories=len(targets.lengths),
        targets=len(mismatch),
        units=len(ratio),
        **by_name,
        token_delta={str(place): int(count) for place, count in enumerate(histogram) if count},
        sequence_log_ratio=by_version,
    )
