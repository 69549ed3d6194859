"""A training replica: one policy, its optimizer, and the gradient sum of the open step. No HTTP, no Redis.

Invariant: between ``begin`` and ``update`` the gradient buffers hold a plain *sum* over the micro-steps trained so far
(plus the sums of other replicas that were added), so the result does not depend on how the batch was cut, in which
order it came, or which replica computed what; the division by N happens once, in ``update``. All tensors go in and out
by Hugging Face name, in fp32. Not safe to use from two threads. It knows nothing of which micro-steps a step has
(``infra.megatron.service``).

In a world of several ranks each has a Replica, and all ranks make the same calls in the same order: what a method takes
and returns by name are whole tensors, the same on every rank, and methods that return them are collective. Only
``train`` differs, between data-parallel ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infra.megatron.model.layout import ON_CPU, RankPlace
from infra.megatron.model.model import build, device, target_logprobs
from infra.megatron.model.pack import Runs
from infra.megatron.model.shape import read_shape
from infra.megatron.model.weights import add_into, check, copy_into, gathered_tensors, square_sum, table
from trajectory.config import LossConfig, OptimizerConfig
from trajectory.loss import loss_named, policy_loss
from trajectory.micro_step import MicroStep

from megatron.core.distributed import (  # isort: skip - after infra.megatron.model.model, which installs the shim
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig  # isort: skip
from megatron.core.optimizer import get_megatron_optimizer  # isort: skip

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingError(RuntimeError):
    """The replica was asked for something out of order, or a loss or gradient is not a finite number."""


class Replica:
    """This rank's part of one Megatron world; a world of one rank is begun where there is none. Weights are arbitrary
    until ``load``.

    ``share_prefixes``: whether prefixes that trajectories of a micro-step share are computed once. With Transformer
    Engine that is not the default: the call that it makes has not been run.
    """

    def __init__(
        self,
        policy_dir: Path,
        optimizer: OptimizerConfig | None = None,
        loss: LossConfig | None = None,
        *,
        share_prefixes: bool = ON_CPU,
    ) -> None:
        self.shape = read_shape(policy_dir)
        self._model = build(self.shape, share_prefixes=share_prefixes)
        self._place = RankPlace.here()
        self._share_prefixes = share_prefixes
        if not share_prefixes:
            logger.warning("trajectories are trained written out: each computes the prefix that it shares with others")
        self._ddp = DistributedDataParallel(
            self._model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            self._model,
        )
        self._parameters: dict[str, Any] = dict(self._model.named_parameters())
        self._rows = table(self.shape, set(self._parameters), self._place)
        for row in self._rows:
            if row.split is not None and row.is_on(self._place):
                # Megatron marks cut parameters while it initialises them, which is not done here; unmarked ones count
                # as copies, and gradient clipping would leave out what the other tensor-parallel ranks have
                self._parameters[row.parameter].tensor_model_parallel = True
        self.version = -1
        """Weight version held, -1 before the first ``load``."""
        self.step: int | None = None
        """The step whose gradient is being summed; None outside of one."""
        self.loss = loss or LossConfig()
        self.optimizer = optimizer or OptimizerConfig()
        self._optimizer = self._make_optimizer()
        self._reduced = False  # the buffers hold the sums of all ranks, no longer those of this one

    def configure(self, optimizer: OptimizerConfig, loss: LossConfig) -> None:
        """Set the run's optimizer and loss. Another optimizer configuration drops the optimizer's state.

        Raises PluginError, changing nothing, when the loss is an installed package's and can't be used.
        """
        loss_named(loss.loss)
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
            copy_into(self._rows, weights, self._parameters, self._place)
            copy_into(self._rows, weights, self._masters(), self._place)
        self.version = version

    def weights(self) -> dict[str, Tensor]:
        """fp32 copies by Hugging Face name; nothing that the replica does later changes them."""
        return {name: _copy(tensor) for name, tensor in gathered_tensors(self._rows, self._masters(), self._place)}

    def load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what ``optimizer_tensors`` gave; empty means the state before the first update.

        Raises WeightsError when it is not the state of this policy and this kind of optimizer.
        """
        split: dict[str, dict[str, Tensor]] = {
            moment: {key.removesuffix(f".{moment}"): t for key, t in tensors.items() if key.endswith(f".{moment}")}
            for moment in MOMENTS
        }
        if tensors:
            if self.optimizer.kind == "sgd":
                raise TrainingError("plain SGD has no state, but a state was given")
            for moment in MOMENTS:
                check(self._rows, split[moment])
        for inner in self._inner_optimizers():
            inner.state.clear()
            if not tensors:
                continue
            for group in inner.param_groups:
                if not ON_CPU:
                    group["step"] = int(tensors["step"].item())
                for master in group["params"]:
                    inner.state[master] = {moment: torch.zeros_like(master.data) for moment in MOMENTS}
                    if ON_CPU:  # one each: torch's AdamW advances them, and a shared one would advance for every one
                        inner.state[master]["step"] = tensors["step"].clone()
        if tensors:
            for moment in MOMENTS:
                held = {name: state[moment] for name, state in self._states().items()}
                copy_into(self._rows, split[moment], held, self._place)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """fp32 copies of the optimizer's state: ``<name>.exp_avg``, ``<name>.exp_avg_sq``, ``step``.

        Empty before the first update, and always for SGD.
        """
        states = self._states()
        if not states or self.optimizer.kind == "sgd":
            return {}
        tensors: dict[str, Tensor] = {}
        for moment in MOMENTS:
            by_parameter = {name: state[moment] for name, state in states.items()}
            for name, tensor in gathered_tensors(self._rows, by_parameter, self._place):
                tensors[f"{name}.{moment}"] = _copy(tensor)
        any_state = next(iter(states.values()))
        steps = any_state["step"] if "step" in any_state else self._inner_optimizers()[0].param_groups[0]["step"]
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
        self._reduced = False

    def train(self, micro_step: MicroStep) -> dict[str, Any]:
        """Forward and backward over one packed micro-step; its gradient is added to the sum. Returns the loss stats.

        Ranks that are not data-parallel to each other take the same micro-step, and get the same statistics.
        Raises TrainingError when no step is open, or the loss is not finite (the sum is then unchanged). When the
        backward pass itself fails, the sum is dropped and the step left, since a part may have been added.
        """
        self._require_open()
        if self._reduced:
            raise TrainingError("the sums of this step's ranks are already added up")
        if not self._share_prefixes:
            micro_step = micro_step.unshared()
        where = device()

        def on_device(column: Any) -> Tensor:
            return torch.tensor(column, device=where)

        logprobs = target_logprobs(
            self._model,
            on_device(micro_step.ids),
            Runs.of(micro_step),
            on_device(micro_step.target),
            on_device(micro_step.temperature),
        )
        loss, stats = policy_loss(logprobs, micro_step, self.loss)
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
        with self._summed_over_ranks():
            return {name: _copy(tensor) for name, tensor in gathered_tensors(self._rows, self._sums(), self._place)}

    def add_gradient(self, gradient: Mapping[str, Tensor]) -> None:
        """Add another replica's sum to the open step's, which in a world of several ranks ends its training.

        Raises WeightsError, adding nothing, when it does not fit.
        """
        self._require_open()
        check(self._rows, gradient)
        self._sum_over_ranks()
        with torch.no_grad():
            add_into(self._rows, gradient, self._sums(), self._place)

    def update(self, normaliser: float) -> float:
        """Divide the sum by N once, clip, step the optimizer, and leave the step: the weights are version + 1.

        Returns the gradient's global L2 norm after the division and before clipping. A gradient that is zero
        everywhere (no micro-step at all) makes no optimizer step. Raises TrainingError, changing nothing, when the
        gradient is not finite.
        """
        self._require_open()
        if normaliser <= 0:
            raise TrainingError(f"the gradient is to be divided by {normaliser}")
        self._sum_over_ranks()
        norm = math.sqrt(square_sum(self._rows, self._sums(), self._place)) / normaliser
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
        for inner in self._inner_optimizers():
            for state in inner.state.values():
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
        self._optimizer = made
        for inner in self._inner_optimizers():
            for group in inner.param_groups:  # Megatron leaves this to its learning rate scheduler
                group["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
        return made

    def _inner_optimizers(self) -> list[Any]:
        """torch's optimizers: one, and another for experts where there are any."""
        return [each.optimizer for each in getattr(self._optimizer, "chained_optimizers", [self._optimizer])]

    def _states(self) -> dict[str, Any]:
        """The optimizer's state of each of this rank's parameters that has one."""
        states: dict[Any, Any] = {}
        for inner in self._inner_optimizers():
            states |= inner.state
        return {name: states[master] for name, master in self._masters().items() if states.get(master)}

    def _sum_over_ranks(self) -> None:
        """Make the buffers hold the sums of all ranks, once per step."""
        if not self._reduced:
            finalize_model_grads([self._ddp])
        self._reduced = self._place.layout.ranks > 1

    @contextmanager
    def _summed_over_ranks(self) -> Iterator[None]:
        """While it lasts the buffers hold the sums of all ranks; afterwards again this rank's."""
        if self._reduced or self._place.layout.ranks == 1:
            yield
            return
        buffers = [buffer.grad_data for buffer in (*self._ddp.buffers, *self._ddp.expert_parallel_buffers)]
        own = [buffer.clone() for buffer in buffers]
        finalize_model_grads([self._ddp])
        yield
        for buffer, before in zip(buffers, own, strict=True):
            buffer.copy_(before)

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
