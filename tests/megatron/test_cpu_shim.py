"""Megatron finds a CPU where it asks for CUDA, and everybody else finds torch as it was."""

from __future__ import annotations

import pytest
import torch

from infra.megatron.model import cpu_shim

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing beside CUDA")
cpu_shim.install()


def test_what_megatron_asks_of_cuda_is_answered_with_the_cpu() -> None:
    assert torch.cuda.current_device() == torch.device("cpu")
    for name in cpu_shim.FACTORIES:
        argument = 3 if name != "full" else (3,)
        extra = {"fill_value": 1} if name == "full" else {}
        assert getattr(torch, name)(argument, device="cuda", **extra).device.type == "cpu"


def test_streams_are_done_when_they_are_asked() -> None:
    stream, tensor = torch.cuda.Stream(), torch.ones(1)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert tensor.cuda() is tensor
    stream.record_event().synchronize()


def test_nobody_but_megatron_sees_a_cuda_type() -> None:
    assert torch.zeros(1).type() == "torch.FloatTensor"
    asked = eval("lambda t: t.type()", {"__name__": "megatron.core.optimizer.clip_grads"})
    assert asked(torch.zeros(1)) == "torch.cuda.FloatTensor"
    assert asked(torch.zeros(1, dtype=torch.int)) == "torch.IntTensor"


def test_device_contexts_still_work() -> None:
    with torch.device("meta"):
        assert torch.arange(3).device.type == "meta"


def test_installing_twice_changes_nothing() -> None:
    empty = torch.empty
    assert cpu_shim.install()
    assert torch.empty is empty
