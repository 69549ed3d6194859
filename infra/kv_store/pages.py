"""What a page of KV is called in the store, and how large it is.

The invariant: two pages have one name only if they hold the same tokens after the same prefix, computed by the same
weights and laid out alike. The name is a chain of SHA-256 over the pages before it, which begins with the weights (the
request's salt), under a namespace that stands for the shapes. The chain is SGLang's own (a page of token ids as
little-endian uint32 after the digest before it), so a reader needs no engine to say what an engine wrote.

It knows no store and no engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE_TOKENS = 16
"""Tokens of a page: the unit in which prefixes are found and moved."""
KV_ITEM_BYTES = 4
"""Engines are started with ``--dtype float32`` (``infra.sglang.launch``), and their KV has the weights' dtype."""
FIRST_SHARD = "0-1.0-1"
"""Of an engine that is one process: tensor-parallel rank 0 of 1, pipeline rank 0 of 1."""
_SHAPE = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


def cache_salt(version: int, weights: str) -> str:
    """What separates KV by the weights that computed it.

    ``weights`` is the engine's checksum of them, "" where none is known: then versions alone separate, which is not
    enough for a store that several runs share.
    """
    return f"{version}-{weights}" if weights else str(version)


def read_config(policy: Path) -> dict[str, Any]:
    """The policy folder's model configuration. Raises FileNotFoundError."""
    config: dict[str, Any] = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    return config


def namespace(config: dict[str, Any]) -> str:
    """Stands for everything but tokens and weights that KV depends on: 16 hex digits."""
    facts = [config, PAGE_TOKENS, KV_ITEM_BYTES, 1]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def bytes_per_token(config: dict[str, Any]) -> int:
    """Bytes of KV of one token in all layers. Raises ValueError for a configuration that lacks a shape."""
    heads = int(config.get("num_attention_heads") or 0)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or (int(config.get("hidden_size") or 0) // heads if heads else 0))
    size = int(config.get("num_hidden_layers") or 0) * 2 * kv_heads * head_dim * KV_ITEM_BYTES
    if size <= 0:
        raise ValueError(f"the model's configuration lacks one of {', '.join(_SHAPE)}")
    return size


def root_digest(salt: str) -> bytes:
    """Where the chain of a request's pages begins: SGLang's ``storage_namespace_seed(None, salt)``."""
    written = salt.encode("utf-8")
    seed = b"sglang-cache-namespace-v1" + b"\x00" + b"\x01" + len(written).to_bytes(8, "little") + written
    return hashlib.sha256(seed).digest()


def page_digests(tokens: TokenIds, before: bytes | None, page_tokens: int = PAGE_TOKENS) -> list[str]:
    """The digest (hex) of each page of ``tokens`` after digest ``before``; a last page that isn't full has one too."""
    words = np.asarray(tokens).astype("<u4").tobytes()
    digest, digests = before or b"", []
    for start in range(0, len(words), 4 * page_tokens):
        digest = hashlib.sha256(digest + words[start : start + 4 * page_tokens]).digest()
        digests.append(digest.hex())
    return digests


def object_name(space: str, digest: str, shard: str = FIRST_SHARD) -> str:
    """Name of one page's KV (of one shard) in the store."""
    return f"gyre-kv.{space}.{shard}.{digest}"
