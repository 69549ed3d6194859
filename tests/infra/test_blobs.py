"""The blob store: what a reader can find is complete and is what was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.state.blobs import BlobMissing, BlobStore


def test_what_was_put_comes_back_under_its_hash(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    ref = store.put(b"tokens")
    assert ref == store.put(b"tokens")
    assert store.get(ref) == b"tokens"


def test_a_damaged_blob_is_refused(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    ref = store.put(b"weights")
    digest = ref.removeprefix("sha256:")
    (tmp_path / "sha256" / digest[:2] / digest).write_bytes(b"weighty")
    with pytest.raises(ValueError, match="damaged"):
        store.get(ref)


def test_a_missing_blob_and_a_malformed_reference_are_told_apart(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    with pytest.raises(BlobMissing):
        store.get("sha256:" + "0" * 64)
    with pytest.raises(ValueError, match="reference"):
        store.get("latest")


def test_names_are_replaced_atomically_and_listed_without_half_written_ones(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    store.put_named("runs/r/LATEST", b"1")
    store.put_named("runs/r/LATEST", b"2")
    (tmp_path / "named" / "runs" / "r" / "LATEST.part-1234").write_bytes(b"torn")
    assert store.get_named("runs/r/LATEST") == b"2"
    assert store.names("runs/r") == ["runs/r/LATEST"]
    assert store.names("runs/other") == []


def test_an_object_store_works_the_same() -> None:
    store = BlobStore("memory://gyre-test")
    ref = store.put(b"x")
    store.put_named("runs/r/LATEST", ref.encode())
    assert store.get(store.get_named("runs/r/LATEST").decode()) == b"x"
    assert store.names("runs/r") == ["runs/r/LATEST"]
