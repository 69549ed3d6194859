"""Reading another process's registered memory with the Mooncake Transfer Engine.

Invariant: memory into which a transfer may still write is never reused. A buffer comes from ``allocate`` and belongs to
the endpoint until ``release``; when one of its transfers did not end it is quarantined: kept, registered, until the
engine has said of each transfer that it ended (a stopped source that thaws writes into it, and nowhere else).

Deadlines are the endpoint's own, since the engine's are too long or absent. What the engine does unasked shaped this
module (version 0.3.13.post1):

- A transfer id is freed by the poll that first says "ended"; polling it again is a use after free. Of a batch's entries
  only the first is looked at, hence one entry per batch.
- The first submission to a stopped process waits for its handshake for 60 s with the lock that every submission needs.
  Hence the probe, in a thread of its own, before each read. (A source that stops between the answer to the probe and
  the first submission to it still has that effect.)
- What is known of ``host:port`` is never forgotten: another process at the same port is sent to its predecessor's data
  port for ever, and pooled connections to a dead process fail one read each. Hence failed reads are repeated while the
  source answers, under another spelling of the port (a leading zero), which the engine takes for another peer.

Security: the engine listens on every interface whatever it is told (handshake on 0.0.0.0, data on [::], random ports
of MC_MIN_RPC_PORT..MC_MAX_RPC_PORT, 15000-17000 by default) and lets anybody read *and write* registered memory. It
needs a private network or a firewall. gyre only ever reads, and checks what it has read.

With RDMA cards present the engine uses them unless MC_FORCE_TCP is set; MC_FORCE_HCA=1 makes their absence an error.
It knows addresses and bytes. It knows nothing of tensors' names, digests or manifests.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

WINDOW: Final = 8
"""Transfers in flight at once (the engine has 4 connections per peer and refuses more than about 2,000)."""

ATTEMPTS: Final = 7
"""Times a read is tried while its source answers: once per pooled connection (4) that may be dead, and three more."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.005
SETTLE_S: Final = 1.0
"""Seconds that the other transfers of a failed read get to end before their buffer is quarantined."""

_NO_TRANSFER: Final = (0, -1, 2**64 - 1)
_COMPLETED, _PENDING, _FAILED = 1, 0, -1


class TransferError(RuntimeError):
    """A transfer failed: a reason to try another source. The endpoint is usable, and nothing that was read has reached
    the caller."""


class SourceLost(TransferError):
    """The source's process is gone, or it refuses to be read at that address."""


class TransferStalled(TransferError):
    """Nothing arrived for too long, or the deadline passed: a stopped process, a dead link, an overloaded machine."""


class ReadOp(NamedTuple):
    address: int
    """In the source's address space."""
    offset: int
    """In the local buffer, bytes."""
    nbytes: int


@dataclass
class _Quarantined:
    buffer: torch.Tensor
    transfers: set[int]
    for_good: bool
    """The engine gave up on a transfer without ending it: nothing will ever be known of it."""


class MooncakeEndpoint:
    """This process's transfer engine. Make one per process; it serves reads as long as it lives. Thread-safe.

    A forked child can't use it (it raises TransferError there): start processes with spawn. Raises ImportError when
    libibverbs is missing, and TransferError when the engine doesn't start.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # the engine reads it when it is made
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            error.add_note("the transfer engine needs: apt-get install libibverbs1 libnuma1 libcurl4")
            raise
        self._engine: Any = TransferEngine()  # first attribute: gone, and its threads with it, before any buffer
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise TransferError(f"the Mooncake transfer engine did not start on {host}")
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._buffers: dict[int, torch.Tensor] = {}
        self._quarantine: list[_Quarantined] = []
        self._spellings: dict[str, int] = {}

    @property
    def quarantined_bytes(self) -> int:
        """Bytes that are kept because a transfer may still write into them."""
        with self._lock:
            return sum(entry.buffer.nbytes for entry in self._quarantine)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A registered uint8[nbytes] buffer of arbitrary content, 64-byte aligned, that other processes can read."""
        self._require_own_process()
        self._reap()
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        address = buffer.data_ptr()
        with self._lock:
            code = self._engine.register_memory(address, nbytes)
            if code != 0:
                raise TransferError(f"the transfer engine refuses to register {nbytes} bytes (code {code})")
            self._buffers[address] = buffer
        return buffer

    def release(self, buffer: torch.Tensor) -> None:
        """Take back a buffer: no process can read it any more, its memory goes with its last tensor.

        A quarantined buffer stays as it is until its transfers have ended. Releasing twice does nothing.
        """
        with self._lock:
            if not any(entry.buffer is buffer for entry in self._quarantine):
                self._unregister(buffer)

    def read(
        self, session: str, buffer: torch.Tensor, ops: Sequence[ReadOp], *, deadline_s: float, stall_s: float
    ) -> None:
        """Read each op's bytes of the process ``session`` (``host:port``) into a buffer of ``allocate``.

        Blocks, without the GIL most of the time. Raises TransferStalled after ``stall_s`` seconds in which no op ended,
        or ``deadline_s`` seconds in all; SourceLost when the source is gone or refuses an op. After either, what is in
        the buffer is undefined, and may still change.
        """
        self._require_own_process()
        self._reap()
        deadline = time.monotonic() + deadline_s
        left, failed = [op for op in ops if op.nbytes], list[ReadOp]()
        for attempt in range(ATTEMPTS):
            if attempt == 1:
                with self._lock:
                    self._spellings[session] = self._spellings.get(session, 0) + 1
            self._probe(session, min(stall_s, deadline - time.monotonic()))
            tried = left[:1] if failed else left  # after a failure one op goes ahead: a refusal is soon known
            failed = self._read_once(self._spelling(session), buffer, tried, deadline, stall_s)
            left = failed + left[len(tried) :]
            if not left:
                return
        raise SourceLost(f"{session} answers but refuses to be read at {left[0].address:#x} (+{left[0].nbytes} bytes)")

    def _read_once(
        self, peer: str, buffer: torch.Tensor, ops: Sequence[ReadOp], deadline: float, stall_s: float
    ) -> list[ReadOp]:
        """Returns the ops that failed or, once one had failed, were not begun."""
        waiting, failed = deque(ops), list[ReadOp]()
        in_flight: dict[int, ReadOp] = {}
        given_up: set[int] = set()
        base = buffer.data_ptr()
        pause, progress = FIRST_PAUSE_S, time.monotonic()
        try:
            while in_flight or (waiting and not failed):
                while waiting and not failed and len(in_flight) < WINDOW:
                    op = waiting.popleft()
                    remote, local = [op.address], [base + op.offset]
                    transfer = self._engine.batch_transfer_async_read(peer, local, remote, [op.nbytes])
                    if transfer in _NO_TRANSFER:
                        failed.append(op)
                    else:
                        in_flight[transfer] = op
                before = len(in_flight)
                for transfer in tuple(in_flight):
                    status = self._engine.transfer_check_status(transfer)
                    if status == _PENDING:
                        continue
                    op = in_flight.pop(transfer)  # its id is freed: it must not be polled again
                    if status == _FAILED:
                        failed.append(op)
                    elif status != _COMPLETED:
                        given_up.add(transfer)
                now = time.monotonic()
                left = len(in_flight) + len(waiting)
                if given_up:
                    raise TransferStalled(f"the engine gave up on a read of {peer} without ending it")
                if left and now > deadline:
                    raise TransferStalled(f"the deadline passed with {left} of {len(ops)} reads of {peer} left")
                if len(in_flight) < before:
                    pause, progress = FIRST_PAUSE_S, now
                elif in_flight:
                    if failed and now - progress > min(SETTLE_S, stall_s):
                        raise SourceLost(f"a read of {peer} failed, and {len(in_flight)} others did not end")
                    if now - progress > stall_s:
                        raise TransferStalled(f"nothing arrived from {peer} for {stall_s:g} s, {left} reads are left")
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
        finally:
            if in_flight or given_up:
                with self._lock:
                    self._quarantine.append(_Quarantined(buffer, set(in_flight), for_good=bool(given_up)))
        return [*failed, *waiting]

    def _probe(self, session: str, timeout_s: float) -> None:
        """Ask whether the process answers. Raises SourceLost when it is gone, TransferStalled when it is silent."""
        answers: queue.SimpleQueue[int] = queue.SimpleQueue()
        # In a thread, since a stopped process keeps the probe waiting for a minute; it ends by itself.
        threading.Thread(target=lambda: answers.put(self._engine.send_probe(session)), daemon=True).start()
        try:
            code = answers.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            raise TransferStalled(f"{session} has not answered a probe for {timeout_s:.3g} s") from None
        if code != 0:
            raise SourceLost(f"no process answers at {session} (code {code})")

    def _spelling(self, session: str) -> str:
        with self._lock:
            zeros = self._spellings.get(session, 0)
        host, _, port = session.rpartition(":")
        return f"{host}:{'0' * zeros}{port}"

    def _reap(self) -> None:
        """Let go of quarantined buffers whose transfers have ended meanwhile."""
        with self._lock:
            entries, self._quarantine = self._quarantine, []
            for entry in entries:
                for transfer in tuple(entry.transfers):
                    status = self._engine.transfer_check_status(transfer)
                    if status != _PENDING:
                        entry.transfers.discard(transfer)
                        entry.for_good |= status not in (_COMPLETED, _FAILED)
                if entry.transfers or entry.for_good:
                    self._quarantine.append(entry)
                else:
                    self._unregister(entry.buffer)

    def _unregister(self, buffer: torch.Tensor) -> None:
        address = buffer.data_ptr()
        if self._buffers.get(address) is not buffer:
            return  # another thread's ``_reap`` came first
        code = self._engine.unregister_memory(address)
        if code != 0:
            raise TransferError(f"the transfer engine doesn't release the buffer at {address:#x} (code {code})")
        del self._buffers[address]

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise TransferError("a transfer endpoint doesn't survive a fork: start the process with spawn")
