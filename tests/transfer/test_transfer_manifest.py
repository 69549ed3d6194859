"""What checksums and manifests tell apart."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from infra.transfer.manifest import TransferManifest, checksum

SIZES = st.lists(st.integers(0, 5), max_size=3)
NAMED = st.dictionaries(
    st.text(max_size=4), st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), SIZES), max_size=4
)


def build(named: dict[str, tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) for name, (dtype, shape) in named.items()
    }


@given(NAMED, st.randoms(use_true_random=False))
def test_checksum_ignores_order_and_strides(named: dict[str, tuple[torch.dtype, list[int]]], random: Random) -> None:
    tensors = build(named)
    items = list(tensors.items())
    random.shuffle(items)
    strided = {name: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for name, tensor in items}
    assert checksum(strided) == checksum(tensors)


@given(NAMED, st.data())
def test_checksum_sees_a_single_bit(named: dict[str, tuple[torch.dtype, list[int]]], data: st.DataObject) -> None:
    tensors = build({"always": (torch.bfloat16, [3]), **named})
    before = checksum(tensors)
    name = data.draw(st.sampled_from(sorted(name for name, tensor in tensors.items() if tensor.numel())))
    raw = tensors[name].view(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(tensors) != before


def test_checksum_sees_names_shapes_and_dtypes() -> None:
    zeros = torch.zeros(4)
    variants: list[dict[str, torch.Tensor]] = [
        {},
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.reshape(2, 2)},
        {"a": zeros.view(torch.int32)},
        {"a": zeros[:2], "b": zeros[2:]},
        {"a": zeros, "b": zeros[:0]},
        {"a": zeros, "b": zeros[:0].to(torch.int64)},
        {"a": torch.full((4,), -0.0)},
    ]
    assert len({checksum(variant) for variant in variants}) == len(variants)
    with pytest.raises(TypeError):
        checksum({"a": torch.zeros(2, dtype=torch.complex64)})


X: dict[str, object] = {"name": "x", "dtype": "float32", "shape": (9,), "offset": 64, "nbytes": 36}
GOOD: dict[str, object] = {
    "name": "weights",
    "source": "0" * 32,
    "epoch": 1,
    "session": "127.0.0.1:15000",
    "address": 4096,
    "nbytes": 100,
    "chunk_bytes": 64,
    "digests": ("a", "b"),
    "tensors": (X,),
}


def test_manifest_checksum_covers_every_field() -> None:
    manifest = TransferManifest.model_validate(GOOD)
    assert TransferManifest.model_validate_json(manifest.model_dump_json()).checksum == manifest.checksum
    for change in ({"epoch": 2}, {"address": 8192}, {"digests": ("a", "c")}, {"session": "127.0.0.1:15001"}):
        assert TransferManifest.model_validate(GOOD | change).checksum != manifest.checksum


@pytest.mark.parametrize(
    "change",
    [
        {"digests": ("a",)},
        {"nbytes": 99},
        {"chunk_bytes": 0},
        {"tensors": (X | {"dtype": "complex64"},)},
        {"tensors": (X | {"shape": (10,)},)},
        {"tensors": (X | {"shape": (-9, -1)},)},
        {"tensors": (X | {"offset": 68},)},
        {"tensors": (X | {"offset": 128},)},
        {"tensors": (X, X)},
        {"surprise": 1},
    ],
)
def test_manifest_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TransferManifest.model_validate(GOOD | change)


def test_manifests_can_be_read_without_torch() -> None:
    code = "import infra.transfer.manifest, sys; sys.exit('torch' in sys.modules or 'mooncake' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
