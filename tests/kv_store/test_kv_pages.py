"""Names of pages: equal to what engines call them, and different for everything that KV depends on."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.utils import storage_namespace_seed

from infra.kv_store.pages import (
    PAGE_TOKENS,
    bytes_per_token,
    cache_salt,
    namespace,
    object_name,
    page_digests,
    root_digest,
)
from infra.sglang.hicache_cpu import copy_to_device, copy_to_host

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=80)
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 128,
}


@settings(deadline=None)
@given(TOKENS, st.text(max_size=20))
def test_digests_are_those_that_sglang_gives_its_pages(tokens: list[int], salt: str) -> None:
    assert storage_namespace_seed(None, salt) == root_digest(salt).hex()
    digest, expected = root_digest(salt), []
    for start in range(0, len(tokens), PAGE_TOKENS):
        words = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + PAGE_TOKENS])
        digest = hashlib.sha256(digest + words).digest()
        expected.append(digest.hex())
    for given_as in (tokens, array("i", tokens), np.asarray(tokens, dtype=np.int64)):
        assert page_digests(given_as, root_digest(salt)) == expected


@settings(deadline=None)
@given(TOKENS, TOKENS, st.integers(0, 5))
def test_a_page_is_named_by_all_that_came_before_it(first: list[int], then: list[int], pages: int) -> None:
    whole = page_digests(first + then, root_digest("1"))
    cut = min(pages, len(first + then) // PAGE_TOKENS)
    head, tail = (first + then)[: cut * PAGE_TOKENS], (first + then)[cut * PAGE_TOKENS :]
    before = bytes.fromhex(whole[cut - 1]) if cut else root_digest("1")
    assert page_digests(head, root_digest("1")) + page_digests(tail, before) == whole
    assert not set(whole) & set(page_digests(first + then, root_digest("2")))


def test_weights_separate_even_where_versions_do_not() -> None:
    assert len({cache_salt(1, ""), cache_salt(2, ""), cache_salt(1, "aa"), cache_salt(1, "bb")}) == 4


def test_shapes_separate_and_tell_the_size() -> None:
    assert bytes_per_token(SHAPE) == 2 * 2 * 2 * 32 * 4
    assert bytes_per_token({**SHAPE, "head_dim": None, "num_key_value_heads": None}) == 2 * 2 * 4 * 32 * 4
    other = {**SHAPE, "num_hidden_layers": 3}
    assert object_name(namespace(SHAPE), "aa") != object_name(namespace(other), "aa")
    with pytest.raises(ValueError, match="num_hidden_layers"):
        bytes_per_token({"hidden_size": 128})


def test_pages_come_back_from_the_host_as_they_went() -> None:
    layers, page, heads, dim, pages = 3, 4, 2, 5, 6
    device = [torch.randn(pages * page, heads, dim) for _ in range(2 * layers)]  # K's layers, then V's
    host = [torch.full((pages, layers, page, heads, dim), torch.nan) for _ in range(2)]
    source = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3])
    place = torch.tensor([20, 21, 22, 23, 4, 5, 6, 7])
    copy_to_host(device, host, source, place, page)
    assert torch.equal(host[0][5, 1], device[1][8:12]) and torch.equal(host[1][1, 2], device[5][0:4])
    assert torch.isnan(host[0][[0, 2, 3, 4]]).all()
    fresh = [torch.zeros(pages * page, heads, dim) for _ in range(2)]
    target = torch.tensor([12, 13, 14, 15, 16, 17, 18, 19])
    copy_to_device(host, fresh, place, target, layer_id=1, page_size=page)
    assert torch.equal(fresh[0][target], device[1][source]) and torch.equal(fresh[1][target], device[4][source])
