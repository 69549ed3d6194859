"""Lets megatron-core run where torch has no CUDA: the few hard-coded ``cuda`` names are answered with the CPU.

Invariant: beside a usable CUDA device ``install`` changes nothing, so the GPU runs Megatron as published. Without one
it replaces functions of torch for the whole process (see ``SHIMMED``), which is why a replica has a process of its
own, and it must run before anything of megatron is imported. It knows nothing of models; what Megatron's modules lack
on CPU is in ``infra.megatron.model.layers``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

FACTORIES: Final = ("arange", "empty", "full", "ones", "tensor", "zeros")
SHIMMED: Final = (
    "cuda.current_device",
    "cuda.current_stream",
    "cuda.stream",
    "cuda.Stream",
    "Tensor.cuda",
    "Tensor.type",
    *FACTORIES,
)
"""What is replaced, relative to ``torch``."""

_CUDA_TYPE: Final = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}

_installed = False


def install() -> bool:
    """Install the shim once. Returns whether this process now runs with it (False beside CUDA).

    Raises RuntimeError when Megatron was imported before.
    """
    global _installed  # noqa: PLW0603 - what it guards is itself global to the process
    if torch.cuda.is_available() or _installed:
        return _installed
    if "megatron.core" in sys.modules:
        raise RuntimeError("infra.megatron.model.cpu_shim.install() must run before megatron.core is imported")
    cpu = torch.device("cpu")
    with cpu:  # torch looks its factories up once, at the first use of a device context: let it find its own
        torch.empty(0)
    torch.cuda.current_device = lambda: cpu
    only_stream = _NoStream()
    torch.cuda.Stream = _NoStream
    torch.cuda.current_stream = lambda *_: only_stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name), cpu))
    torch.Tensor.type = _type_as_megatron_expects(torch.Tensor.type)
    _installed = True
    return True


class _NoStream:
    """In place of a stream, and of an event on it: what is asked of the CPU has happened when the call returns."""

    def wait_stream(self, _: Any) -> None:
        return None

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None:
        return None


def prepare_experts() -> None:
    """Two slips of Megatron's layers of experts that only show without CUDA: a name that is not defined without
    Transformer Engine, and sizes of messages that stay tensors where lists of numbers are meant."""
    if not _installed:
        return
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
    )


def _on_cpu(factory: Callable[..., Any], cpu: torch.device) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made_on_cpu(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = cpu
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made_on_cpu


def _type_as_megatron_expects(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's gradient clipping and optimizers compare ``tensor.type()`` with the names of CUDA types."""

    @functools.wraps(plain)
    def type_(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = plain(self, *args, **kwargs)
        if args or kwargs:
            return answer
        asked_by = str(sys._getframe(1).f_globals.get("__name__", ""))
        return _CUDA_TYPE.get(answer, answer) if asked_by.startswith("megatron.") else answer

    return type_
