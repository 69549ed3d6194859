"""Publishing named tensors to other processes, and pulling them.

Invariant: what ``pull`` returns is exactly one publication, verified against its manifest, or it raises. A publisher
copies tensors into memory of its own and alternates between two slots per name, so the readers of a publication are
undisturbed by the next one; the one after that overwrites it, which digests and the identity before the data show.

It knows publications and their verification. It doesn't know how manifests reach a reader, nor when a version is old.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping
from typing import Final

import torch

from infra.transfer.manifest import TensorEntry, TransferManifest, digest, dtype_name, tensor_bytes
from infra.transfer.mooncake import MooncakeEndpoint, ReadOp, TransferError

CHUNK_BYTES: Final = 4 << 20
IDENTITY_BYTES: Final = 64
"""Space before the data for (source, epoch); 64 keeps the data aligned."""

REREADS: Final = 2
"""Times that chunks with a wrong digest are read again before a pull gives up."""


class TornRead(TransferError):
    """The source can be read, but its memory doesn't hold (or no longer holds) what the manifest says."""


class TensorPublisher:
    """Publications of this process. Thread-safe; make one per endpoint."""

    def __init__(self, endpoint: MooncakeEndpoint, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._endpoint, self._chunk_bytes = endpoint, chunk_bytes
        self._source = uuid.uuid4().hex
        self._epoch = 0
        self._slots: dict[str, list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def publish(self, name: str, tensors: Mapping[str, torch.Tensor]) -> TransferManifest:
        """Copy the tensors (any device, any strides) into registered memory and describe them.

        The publication stays readable until the name is withdrawn or published twice more. Raises TypeError for a dtype
        that can't be moved, and TransferError when the engine refuses the memory.
        """
        entries: list[TensorEntry] = []
        nbytes = 0
        for key, tensor in tensors.items():
            offset = -(-nbytes // 64) * 64 if tensor.nbytes else 0
            dtype, shape = dtype_name(tensor), tuple(tensor.shape)
            entries.append(TensorEntry(name=key, dtype=dtype, shape=shape, offset=offset, nbytes=tensor.nbytes))
            nbytes = max(nbytes, offset + tensor.nbytes)
        with self._lock:
            slot = self._free_slot(name, IDENTITY_BYTES + nbytes)
            self._slots.setdefault(name, []).append(slot)
            slot[:IDENTITY_BYTES].zero_()  # before the data changes: older manifests of this slot are void
            data = slot[IDENTITY_BYTES : IDENTITY_BYTES + nbytes]
            for entry, tensor in zip(entries, tensors.values(), strict=True):
                data[entry.offset : entry.offset + entry.nbytes].copy_(tensor_bytes(tensor))
            self._epoch += 1
            manifest = TransferManifest(
                name=name,
                source=self._source,
                epoch=self._epoch,
                session=self._endpoint.session,
                address=slot.data_ptr() + IDENTITY_BYTES,
                nbytes=nbytes,
                chunk_bytes=self._chunk_bytes,
                digests=tuple(digest(chunk.numpy()) for chunk in data.split(self._chunk_bytes) if len(chunk)),
                tensors=tuple(entries),
            )
            slot[:IDENTITY_BYTES].copy_(_identity(manifest))
            return manifest

    def withdraw(self, name: str) -> None:
        """Stop offering a name; its memory is freed. Withdrawing what isn't published does nothing."""
        with self._lock:
            for slot in self._slots.pop(name, []):
                slot[:IDENTITY_BYTES].zero_()
                self._endpoint.release(slot)

    def _free_slot(self, name: str, nbytes: int) -> torch.Tensor:
        slots = self._slots.get(name, [])
        if len(slots) == 2:
            oldest = slots.pop(0)
            if len(oldest) == nbytes:
                return oldest
            self._endpoint.release(oldest)
        return self._endpoint.allocate(nbytes)


def pull(
    endpoint: MooncakeEndpoint, manifest: TransferManifest, *, deadline_s: float, stall_s: float = 5.0
) -> dict[str, torch.Tensor]:
    """Read a publication into fresh memory and verify it. Blocks; at most ``deadline_s`` seconds are spent reading.

    Returns CPU tensors by name, of the manifest's dtypes and shapes, which share one allocation of their own. Raises
    SourceLost, TransferStalled (``stall_s`` seconds without a byte, or the deadline) or TornRead (the publication has
    been overwritten, or its bytes are wrong each time they are read).
    """
    deadline = time.monotonic() + deadline_s
    staging = endpoint.allocate(IDENTITY_BYTES + manifest.nbytes)
    data = staging[IDENTITY_BYTES:]

    def read(*parts: tuple[int, int]) -> None:
        ops = [ReadOp(manifest.address + at, IDENTITY_BYTES + at, length) for at, length in parts]
        left_s = deadline - time.monotonic()
        endpoint.read(manifest.session, staging, ops, deadline_s=left_s, stall_s=stall_s)

    def check_identity() -> None:
        read((-IDENTITY_BYTES, IDENTITY_BYTES))
        if not torch.equal(staging[:IDENTITY_BYTES], _identity(manifest)):
            raise TornRead(f"{manifest.session} no longer holds epoch {manifest.epoch} of {manifest.name}")

    try:
        wrong = list(range(len(manifest.digests)))
        check_identity()
        for _ in range(1 + REREADS):
            read(*(manifest.chunk(index) for index in wrong))
            wrong = [index for index in wrong if _digest_of(data, manifest, index) != manifest.digests[index]]
            if not wrong:
                break
            check_identity()
        else:
            raise TornRead(
                f"{len(wrong)} chunks of {manifest.name} at {manifest.session} have other bytes than promised"
            )
    finally:
        endpoint.release(staging)
    return {entry.name: _tensor(data, entry) for entry in manifest.tensors}


def _identity(manifest: TransferManifest) -> torch.Tensor:
    """uint8[64]: what a slot starts with while it holds this publication."""
    text = bytes.fromhex(manifest.source) + manifest.epoch.to_bytes(8, "little")
    return torch.frombuffer(bytearray(text.ljust(IDENTITY_BYTES, b"\0")), dtype=torch.uint8)


def _digest_of(data: torch.Tensor, manifest: TransferManifest, index: int) -> str:
    offset, length = manifest.chunk(index)
    return digest(data[offset : offset + length].numpy())


def _tensor(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    values: torch.Tensor = data[entry.offset : entry.offset + entry.nbytes].view(dtype).reshape(entry.shape)
    return values
