"""What SGLang's hierarchical KV cache lacks without an accelerator: copies between its two tiers, in torch.

SGLang takes these operators from kernels that exist for GPUs only, compiles its page hash with a C++ compiler at start,
and keeps 10 GiB of the machine's memory free. The functions here stand in their places, on CPU only; those places are
module globals of the pinned version, so a name that is no longer there stops the engine at start.

Layouts. Device pools hold a layer's tokens as rows [tokens, heads, dim]; host pools hold pages
[pages, layers, page, heads, dim] (``page_first_direct``). Indices are tokens, whole pages in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from infra.kv_store.pages import page_digests

MEMORY_RESERVE = 256 << 20
"""Bytes that a host pool leaves free on the machine; the pool of a local cell is small, and so may the machine be."""


def copy_to_device(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    *,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer's rows from host pages to device rows, for K and V."""
    pages, rows = src_indices[::page_size].long() // page_size, dst_indices.long()
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[rows] = host[pages, layer_id].reshape(len(rows), *device.shape[1:])


def copy_to_host(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Device rows of all layers to host pages, first K's layers and then V's."""
    rows, pages = src_indices.long(), dst_indices[::page_size].long() // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, host in enumerate(dst_ptrs):
        for layer, device in enumerate(src_ptrs[number * layers : (number + 1) * layers]):
            host[pages, layer] = device[rows].reshape(len(pages), page_size, *host.shape[3:])


def _allocate(dims: Any, dtype: torch.dtype, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)  # unlike SGLang's own, not touched before it is used


def _native_hash(tokens: Any, before: bytes | None, page_size: int | None = None) -> str | list[str]:
    if getattr(tokens, "is_bigram", False):
        raise NotImplementedError("pages of speculative decoding are not hashed here")
    ids = getattr(tokens, "token_ids", tokens)
    ids = ids[: len(tokens)]
    if page_size is None:
        return page_digests(ids, before, max(1, len(ids)))[-1] if len(ids) else ""
    return page_digests(ids, before, page_size)


def install() -> None:
    """Put them in place, in this process. Raises AttributeError where SGLang has no such place."""
    from sglang.srt.mem_cache import utils
    from sglang.srt.mem_cache.pool_host import base, common, mha

    places: list[tuple[Any, str, Any]] = [
        (utils, "get_native_hash", _native_hash),
        (base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", MEMORY_RESERVE),
    ]
    for module, name, value in places:
        getattr(module, name)
        setattr(module, name, value)
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    # The kernels that these two stand for are imported beside a GPU only: there is nothing to check them against.
    mha.transfer_kv_per_layer_direct_pf_lf = copy_to_device
    mha.transfer_kv_all_layer_direct_lf_pf = copy_to_host
