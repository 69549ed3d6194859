"""A training replica: one policy, its optimizer, and the gradient sum of the open step. No HTTP, no Redis.

Invariant: between ``begin`` and ``update`` the gradient buffers hold a plain *sum* over the micro-steps trained so far
(plus the sums of other replicas that were added), so the result does not depend on how the batch was cut, in which
order it came, or which replica computed what; the division by N happens once, in ``update``. All tensors go in and out
by Hugging Face name, in fp32. Not safe to use from two threads. It knows nothing of which micro-steps a step has
(``infra.megatron.service``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infra.megatron.config import OptimizerConfig
from infra.megatron.model import ON_CPU, build, device, target_logprobs
from infra.megatron.shape import read_shape
from infra.megatron.weights import add_into, check, copy_into, named_tensors, table
from trajectory.loss import LossBatch, gspo_loss
from trajectory.loss_config import LossConfig
from trajectory.micro_step import MicroStep

from megatron.core.distributed import (  # isort: skip - after infra.megatron.model, which installs the shim
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig  # isort: skip
from megatron.core.optimizer import get_megatron_optimizer  # isort: skip

MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingError(RuntimeError):
    """The replica was asked for something out of order, or a loss or gradient is not a finite number."""


class Replica:
    """One Megatron world of one rank. Weights are arbitrary until ``load``."""

    def __init__(
        self, policy_dir: Path, optimizer: OptimizerConfig | None = None, loss: LossConfig | None = None
    ) -> None:
        self.shape = read_shape(policy_dir)
        self._model = build(self.shape)
        self._ddp = DistributedDataParallel(
            self._model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            self._model,
        )
        self._parameters: dict[str, Any] = dict(self._model.named_parameters())
        self._rows = table(self.shape, set(self._parameters))
        self.version = -1
        """Weight version held, -1 before the first ``load``."""
        self.step: int | None = None
        """The step whose gradient is being summed; None outside of one."""
        self.loss = loss or LossConfig()
        self.optimizer = optimizer or OptimizerConfig()
        self._optimizer = self._make_optimizer()

    def configure(self, optimizer: OptimizerConfig, loss: LossConfig) -> None:
        """Set the run's optimizer and loss. Another optimizer configuration drops the optimizer's state."""
        self.loss = loss
        if optimizer == self.optimizer:
            return
        held = self.weights()
        self.optimizer = optimizer
        self._optimizer = self._make_optimizer()
        self.load(held, self.version)

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take weights by Hugging Face name; gradient sums and optimizer state stay as they are.

        Raises WeightsError, changing nothing, when names or shapes are not this policy's.
        """
        with torch.no_grad():
            copy_into(self._rows, weights, self._parameters)
            copy_into(self._rows, weights, self._masters())
        self.version = version

    def weights(self) -> dict[str, Tensor]:
        """fp32 copies by Hugging Face name; nothing that the replica does later changes them."""
        return {name: _copy(tensor) for name, tensor in named_tensors(self._rows, self._masters())}

    def load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what ``optimizer_tensors`` gave; empty means the state before the first update.

        Raises WeightsError when it is not the state of this policy and this kind of optimizer.
        """
        state = self._optimizer.optimizer.state
        split: dict[str, dict[str, Tensor]] = {
            moment: {key.removesuffix(f".{moment}"): t for key, t in tensors.items() if key.endswith(f".{moment}")}
            for moment in MOMENTS
        }
        if tensors:
            if self.optimizer.kind == "sgd":
                raise TrainingError("plain SGD has no state, but a state was given")
            for moment in MOMENTS:
                check(self._rows, split[moment])
        state.clear()
        if not tensors:
            return
        masters = self._masters()
        # one step tensor per parameter: torch's AdamW advances each, and a shared one would advance once per parameter
        for master in masters.values():
            state[master] = {moment: torch.zeros_like(master.data) for moment in MOMENTS}
            if ON_CPU:
                state[master]["step"] = tensors["step"].clone()
        if not ON_CPU:
            for group in self._optimizer.optimizer.param_groups:
                group["step"] = int(tensors["step"].item())
        for moment in MOMENTS:
            copy_into(self._rows, split[moment], {name: state[master][moment] for name, master in masters.items()})

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """fp32 copies of the optimizer's state: ``<name>.exp_avg``, ``<name>.exp_avg_sq``, ``step``.

        Empty before the first update, and always for SGD.
        """
        inner, masters = self._optimizer.optimizer, self._masters()
        states = {name: inner.state[master] for name, master in masters.items() if inner.state.get(master)}
        if not states or self.optimizer.kind == "sgd":
            return {}
        tensors: dict[str, Tensor] = {}
        for moment in MOMENTS:
            by_parameter = {name: state[moment] for name, state in states.items()}
            for name, tensor in named_tensors(self._rows, by_parameter):
                tensors[f"{name}.{moment}"] = _copy(tensor)
        any_state = next(iter(states.values()))
        steps = any_state["step"] if "step" in any_state else inner.param_groups[0]["step"]
        tensors["step"] = torch.as_tensor(steps, dtype=torch.float32, device="cpu").clone()
        return tensors

    def begin(self, step: int) -> None:
        """Open a step: its gradient sum is zero."""
        self.zero()
        self.step = step

    def zero(self) -> None:
        """Drop the gradient sum and leave the step, if one is open."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self.step = None

    def train(self, micro_step: MicroStep) -> dict[str, Any]:
        """Forward and backward over one packed micro-step; its gradient is added to the sum. Returns the loss stats.

        Raises TrainingError when no step is open, or the loss is not finite (the sum is then unchanged). When the
        backward pass itself fails, the sum is dropped and the step left, since a part may have been added.
        """
        self._require_open()
        where = device()

        def on_device(column: Any) -> Tensor:
            return torch.tensor(column, device=where)

        logprobs = target_logprobs(
            self._model,
            on_device(micro_step.ids),
            on_device(micro_step.cu_seqlens),
            on_device(micro_step.target),
            on_device(micro_step.temperature),
        )
        loss, stats = gspo_loss(logprobs, LossBatch.from_micro_step(micro_step, where), self.loss)
        if not bool(torch.isfinite(loss)):
            raise TrainingError(f"the loss of a micro-step is {loss.item()}")
        finished = False
        try:
            with self._ddp.no_sync():
                loss.backward()
            finished = True
        finally:
            if not finished:
                self.zero()
        return asdict(stats)

    def gradient(self) -> dict[str, Tensor]:
        """fp32 copies of the open step's gradient sum, by Hugging Face name."""
        self._require_open()
        return {name: _copy(tensor) for name, tensor in named_tensors(self._rows, self._sums())}

    def add_gradient(self, gradient: Mapping[str, Tensor]) -> None:
        """Add another replica's sum to the open step's. Raises WeightsError, adding nothing, when it does not fit."""
        self._require_open()
        with torch.no_grad():
            add_into(self._rows, gradient, self._sums())

    def update(self, normaliser: float) -> float:
        """Divide the sum by N once, clip, step the optimizer, and leave the step: the weights are version + 1.

        Returns the gradient's global L2 norm after the division and before clipping. A gradient that is zero
        everywhere (no micro-step at all) makes no optimizer step. Raises TrainingError, changing nothing, when the
        gradient is not finite.
        """
        self._require_open()
        if normaliser <= 0:
            raise TrainingError(f"the gradient is to be divided by {normaliser}")
        finalize_model_grads([self._ddp])
        norm = math.sqrt(sum(float(sums.double().square().sum()) for sums in self._sums().values())) / normaliser
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient norm is {norm}")
        if norm > 0:
            self._ddp.scale_gradients(1.0 / normaliser)
            stepped, _, _ = self._optimizer.step()
            if not stepped:
                raise TrainingError("Megatron's optimizer found a gradient that is not finite")
        self.zero()
        self.version += 1
        return norm

    def combine(
        self, sums: Sequence[Mapping[str, Tensor]], normaliser: float, record: bool
    ) -> tuple[float, dict[str, Tensor] | None]:
        """Add other replicas' sums in the given order and ``update``.

        Returns the gradient norm and, when ``record``, the total before division. Raises WeightsError, changing
        nothing, when a sum does not fit; after any other failure the sum is dropped and the step left.
        """
        for gradient in sums:
            check(self._rows, gradient)
        finished = False
        try:
            for gradient in sums:
                self.add_gradient(gradient)
            recorded = self.gradient() if record else None
            norm = self.update(normaliser)
            finished = True
        finally:
            if not finished:
                self.zero()
        return norm, recorded

    def resident_bytes(self) -> int:
        """Bytes of weights, gradient buffers and optimizer state."""
        tensors = [*self._parameters.values(), *self._sums().values()]
        tensors += [master for name, master in self._masters().items() if master is not self._parameters[name]]
        for state in self._optimizer.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _make_optimizer(self) -> Any:
        config = self.optimizer
        made = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam" if config.kind == "adamw" else "sgd",
                lr=config.lr,
                min_lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                sgd_momentum=0.0,
                clip_grad=config.clip_grad,
                bf16=not ON_CPU,
                params_dtype=torch.float32 if ON_CPU else torch.bfloat16,
            ),
            [self._ddp],
        )
        (single,) = getattr(made, "chained_optimizers", [made])
        for group in single.optimizer.param_groups:  # Megatron leaves this to its learning rate scheduler
            group["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
        return single

    def _masters(self) -> dict[str, Any]:
        """The fp32 parameters that the optimizer steps: the model's own, or their masters when it is bf16."""
        return {name: getattr(parameter, "main_param", parameter) for name, parameter in self._parameters.items()}

    def _sums(self) -> dict[str, Any]:
        return {name: parameter.main_grad for name, parameter in self._parameters.items()}

    def _require_open(self) -> None:
        if self.step is None:
            raise TrainingError("no step is open")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()
