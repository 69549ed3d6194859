"""SGLang's storage backend over gyre's KV store: loaded by name through ``--hicache-storage-backend dynamic``.

SGLang's own Mooncake backend is not used for three reasons. It names objects by the served model's name, which gyre
gives to one start of one engine. It refuses to start without a store, and waits for one that hangs (30 s an operation).
And it lets the store write straight into pages that the engine takes back when its patience ends.

The invariant: an engine with this backend starts, serves and stops with or without a store; what the store lacks is
computed. A page is one object: its K and its V, all layers.

It knows KV pools of the kind that give a page as addresses (MHA and GQA); weights and tokens are in the page's digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from infra.kv_store.client import Region, StoreAddress, StoreClient
from infra.kv_store.pages import object_name

BUFFER_BYTES = 8 << 20
"""Through which pages go; more than one page of any model."""


class KvStoreBackend(HiCacheStorage):  # type: ignore[misc]
    """``config.extra_config``: ``master``, ``http``, ``host`` and ``namespace`` (see ``infra.sglang.launch``)."""

    def __init__(self, config: Any, more: dict[str, Any]) -> None:
        given = config.extra_config
        self._space: str = given["namespace"]
        self._shard = f"{config.tp_rank}-{config.tp_size}.{config.pp_rank}-{config.pp_size}"
        self._client = StoreClient(
            StoreAddress(given["master"], given["http"]), given["host"], buffer_bytes=BUFFER_BYTES
        )
        self._client.start()

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many of the first pages are in the store."""
        stored = self._client.look(self._names(keys))
        return stored.index(False) if False in stored else len(stored)

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        read = self._client.read(self._names(keys), self._pages(len(keys), host_indices))
        return [number < read for number in range(len(keys))]

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        names = self._names(keys)
        stored = self._client.look(names)
        new = [number for number, is_stored in enumerate(stored) if not is_stored]
        pages = self._pages(len(keys), host_indices)
        written = self._client.write([names[number] for number in new], [pages[number] for number in new])
        for number, done in zip(new, written, strict=True):
            stored[number] = done
        return stored

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [object_name(self._space, key, self._shard) for key in keys]

    def _pages(self, count: int, host_indices: torch.Tensor) -> list[list[Region]]:
        """The regions of each page. Raises RuntimeError for a pool whose pages aren't whole regions."""
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        parts, left = divmod(len(addresses), count)
        if left:
            raise RuntimeError(f"{len(addresses)} regions are no whole number for each of {count} pages")
        regions = list(zip(addresses, sizes, strict=True))
        return [regions[start : start + parts] for start in range(0, len(regions), parts)]

    def close(self) -> None:
        self._client.close()

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _by_address_only(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("pages are read and written by address")

    get = batch_get = set = batch_set = _by_address_only
    """What SGLang no longer calls for a backend that takes pages by address."""
