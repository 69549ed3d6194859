"""The blob store: content-addressed bytes and named manifests on any fsspec URL.

``put`` is idempotent and its reference is the content's hash, so a retried activity writes the same thing twice
and nothing is ever changed in place. A name (``put_named``) is written last, after the blobs that it points to:
what a reader can find by name is complete.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from typing import Any

import fsspec


class BlobMissing(KeyError):
    """No blob of that reference or name."""


class BlobStore:
    """Bytes under ``url``. Safe to use from several processes; a reader never sees a half-written blob."""

    def __init__(self, url: str) -> None:
        self.fs, self.root = fsspec.core.url_to_fs(url)
        self._local = "file" in ((self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol)

    def put(self, data: bytes) -> str:
        """Store bytes; returns ``sha256:<hex>``."""
        digest = hashlib.sha256(data).hexdigest()
        path = self._blob_path(digest)
        if not self.fs.exists(path):
            self._write(path, data)
        return f"sha256:{digest}"

    def get(self, ref: str) -> bytes:
        """Bytes of a reference; raises BlobMissing when absent and ValueError when they do not match it."""
        scheme, _, digest = ref.partition(":")
        if scheme != "sha256" or len(digest) != 64:
            raise ValueError(f"not a blob reference: {ref!r}")
        data = self._read(self._blob_path(digest), ref)
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"blob {ref} is damaged: its content has another hash")
        return data

    def put_named(self, name: str, data: bytes) -> None:
        """Write (or replace, atomically) the bytes under a name such as ``runs/r1/LATEST``."""
        self._write(f"{self.root}/named/{name}", data)

    def get_named(self, name: str) -> bytes:
        return self._read(f"{self.root}/named/{name}", name)

    def names(self, prefix: str) -> list[str]:
        """Every name under a prefix (a folder), sorted."""
        base = f"{self.root}/named"
        if not self.fs.exists(f"{base}/{prefix}"):
            return []
        paths: list[Any] = self.fs.find(f"{base}/{prefix}")
        return sorted(str(path).split("/named/", 1)[1] for path in paths if ".part-" not in str(path))

    def _blob_path(self, digest: str) -> str:
        return f"{self.root}/sha256/{digest[:2]}/{digest}"

    def _read(self, path: str, what: str) -> bytes:
        try:
            with self.fs.open(path, "rb") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            raise BlobMissing(what) from None

    def _write(self, path: str, data: bytes) -> None:
        self.fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        if not self._local:  # object stores put whole objects atomically
            self.fs.pipe_file(path, data)
            return
        part = f"{path}.part-{uuid.uuid4().hex[:8]}"
        with open(part, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
