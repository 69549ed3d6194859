"""SGLang's platform for a machine without an accelerator: plain torch operators on CPU.

SGLang's own CPU path needs compiled kernels that its PyPI wheel does not carry; an out-of-tree platform with the
default capabilities makes it take the native torch implementation of every operator. ``activate`` is the
``sglang.srt.platforms`` entry point; beside a usable accelerator it declines, so that one installation serves both.
It changes nothing in SGLang but what ``infra.sglang.hicache_cpu`` puts in the places of kernels that only GPUs have.
"""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


def activate() -> str | None:
    """Name of the platform class, or None where torch has an accelerator."""
    if torch.accelerator.is_available():
        return None
    return f"{__name__}.TorchCpuPlatform"


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """One CPU device, torch-native attention, no compilation, no pinned memory."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        return False

    def init_backend(self) -> None:
        from infra.sglang.hicache_cpu import install

        install()

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU
