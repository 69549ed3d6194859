"""Lets megatron-core run where torch has no CUDA: the few hard-coded ``cuda`` names are answered with the CPU.

Invariant: beside a usable CUDA device ``install`` changes nothing, so the GPU runs Megatron as published. Without one
it replaces functions of torch for the whole process (see ``SHIMMED``), which is why a replica has a process of its
own, and it must run before anything of megatron is imported. It knows nothing of models; what Megatron's modules lack
on CPU is in ``infra.megatron.layers``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

FACTORIES: Final = ("arange", "empty", "full", "ones", "tensor", "zeros")
SHIMMED: Final = ("cuda.current_device", "Tensor.type", *FACTORIES)
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
        raise RuntimeError("infra.megatron.cpu_shim.install() must run before megatron.core is imported")
    cpu = torch.device("cpu")
    with cpu:  # torch looks its factories up once, at the first use of a device context: let it find its own
        torch.empty(0)
    torch.cuda.current_device = lambda: cpu
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name), cpu))
    torch.Tensor.type = _type_as_megatron_expects(torch.Tensor.type)
    _installed = True
    return True


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
