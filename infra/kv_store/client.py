"""A Mooncake store as an engine can afford it: every operation ends in time, and a store that is away costs nothing.

The invariants. No caller waits longer than ``operation_s`` for the store, whatever has become of it. Memory that a
transfer may still touch belongs to this module alone: pages are copied to and from a buffer of its own, and the buffer
of an operation that did not end is never used again, nor freed, because Mooncake goes on writing when a frozen peer
thaws. Nothing is asked of the store in the process's own threads before its master has answered over HTTP: Mooncake's
``setup`` keeps the interpreter for 90 seconds when there is no master.

It knows neither tokens nor engines: names and bytes only.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Literal, TypeVar

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Region = tuple[int, int]
"""Address and length in bytes."""

OPERATION_S: Final = 3.0
RETRY_S: Final = 1.0
"""Between two looks for a store that is away, and how long one that reported a fault is left alone."""
PROBE_S: Final = 1.0
ABANDONED: Final = 8
"""Operations that may be left unfinished before the store is given up: each keeps a client and its buffers."""
LOCAL_BUFFER: Final = 1 << 20
"""Of Mooncake's own, which copying through registered memory doesn't need."""
MISSING, NO_SPACE = -704, -200
QUIET: Final = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
"""Mooncake reads them when its library is loaded: otherwise it tells of every connection on standard error."""

Kind = Literal["look", "read", "write"]


@dataclass(frozen=True)
class StoreAddress:
    """Where a store's master is: ``host:port`` for clients, and the URL of its HTTP side."""

    master: str
    http: str


@dataclass
class _Lane:
    """One kind of operation: a thread, and the buffer through which its pages go."""

    buffer: Any
    size: int
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "kv-store"))

    @property
    def address(self) -> int:
        return ctypes.addressof(self.buffer)


@dataclass
class _Link:
    store: Any
    lanes: dict[Kind, _Lane]


class StoreFault(RuntimeError):
    """The store answered with an error code that is neither a missing object nor a full store."""


class StoreClient:
    """``start`` begins to look for the store; until it is found, and whenever it is away, nothing is found in it.

    ``look``, ``read`` and ``write`` may be called from one thread each. ``buffer_bytes`` must hold the largest object.
    """

    def __init__(
        self, address: StoreAddress, host: str, *, buffer_bytes: int, operation_s: float = OPERATION_S
    ) -> None:
        self._address, self._host = address, host
        self._buffer_bytes, self._operation_s = buffer_bytes, operation_s
        self._link: _Link | None = None
        self._rest_until = 0.0
        self._abandoned: list[_Link] = []
        self._stopping = threading.Event()
        self._lost = threading.Event()
        self._lost.set()

    def start(self) -> None:
        threading.Thread(target=self._connect, name="kv-store-connect", daemon=True).start()

    def close(self) -> None:
        """Look for the store no more. What runs is left to end by itself."""
        self._stopping.set()
        self._lost.set()

    @property
    def connected(self) -> bool:
        return self._link is not None and time.monotonic() >= self._rest_until

    def look(self, names: Sequence[str]) -> list[bool]:
        """Which objects are complete in the store."""
        wanted = list(names)
        codes = self._bounded("look", lambda store, lane: _checked(store.batch_is_exist(wanted)))
        return [code == 1 for code in codes] if codes is not None else [False] * len(wanted)

    def read(self, names: Sequence[str], into: Sequence[Sequence[Region]]) -> int:
        """Copy objects into memory, each into its regions in order; returns how many of the first were read whole."""
        done = 0
        for start, count in self._portions(into):
            sizes = [sum(size for _, size in regions) for regions in into[start : start + count]]
            wanted = list(names[start : start + count])

            def work(store: Any, lane: _Lane, wanted: list[str] = wanted, sizes: list[int] = sizes) -> list[int]:
                return _checked(store.batch_get_into(wanted, _places(lane.address, sizes), sizes))

            lane = self._lane("read")
            codes = self._bounded("read", work)
            if codes is None or lane is None:
                return done
            place = lane.address
            for code, size, regions in zip(codes, sizes, into[start : start + count], strict=True):
                if code != size:
                    return done
                for address, length in regions:
                    ctypes.memmove(address, place, length)
                    place += length
                done += 1
        return done

    def write(self, names: Sequence[str], pages: Sequence[Sequence[Region]]) -> list[bool]:
        """Copy memory into objects, each from its regions in order; returns which are in the store."""
        written: list[bool] = []
        for start, count in self._portions(pages):
            part = pages[start : start + count]
            sizes = [sum(size for _, size in regions) for regions in part]
            wanted = list(names[start : start + count])
            lane = self._lane("write")
            if lane is None:
                return written + [False] * (len(names) - len(written))
            place = lane.address
            for regions in part:
                for address, length in regions:
                    ctypes.memmove(place, address, length)
                    place += length

            def work(store: Any, lane: _Lane, wanted: list[str] = wanted, sizes: list[int] = sizes) -> list[int]:
                return _checked(store.batch_put_from(wanted, _places(lane.address, sizes), sizes))

            codes = self._bounded("write", work)
            written += [code == 0 for code in codes] if codes is not None else [False] * count
        return written

    def _portions(self, objects: Sequence[Sequence[Region]]) -> list[tuple[int, int]]:
        """(start, count) of runs of objects that fit into the buffer together. Raises ValueError for one too large."""
        portions: list[tuple[int, int]] = []
        start = used = 0
        for number, regions in enumerate(objects):
            size = sum(length for _, length in regions)
            if size > self._buffer_bytes:
                raise ValueError(f"an object of {size} bytes does not fit into a buffer of {self._buffer_bytes}")
            if used + size > self._buffer_bytes:
                portions.append((start, number - start))
                start, used = number, 0
            used += size
        return [*portions, (start, len(objects) - start)] if objects else []

    def _lane(self, kind: Kind) -> _Lane | None:
        link = self._link
        return None if link is None or not self.connected else link.lanes[kind]

    def _bounded(self, kind: Kind, work: Callable[[Any, _Lane], Result]) -> Result | None:
        """What ``work`` returns; None when the store is away, reports a fault, or doesn't answer in time."""
        link = self._link
        if link is None or not self.connected:
            return None
        lane = link.lanes[kind]
        try:
            return lane.thread.submit(work, link.store, lane).result(self._operation_s)
        except StoreFault as fault:
            self._rest_until = time.monotonic() + RETRY_S
            log.warning("the KV store is left alone for %s s: %s", RETRY_S, fault)
        except TimeoutError:
            self._abandon(link, f"it did not {kind} within {self._operation_s} s")
        return None

    def _abandon(self, link: _Link, why: str) -> None:
        if self._link is not link:
            return
        self._link = None
        self._abandoned.append(link)  # kept: a transfer that thaws still writes into its buffers
        log.warning("the KV store is away (%s); prefixes are computed until it is back", why)
        self._lost.set()

    def _connect(self) -> None:
        while True:
            self._lost.wait()
            if self._stopping.is_set() or len(self._abandoned) >= ABANDONED:
                return
            if self._answers():
                self._link = self._linked()
            if self._link is not None:
                self._rest_until = 0.0
                self._lost.clear()
                log.warning("the KV store at %s is in use", self._address.master)
                if not self._stopping.is_set():
                    continue
            self._stopping.wait(RETRY_S)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address.http}/health", timeout=PROBE_S) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def _linked(self) -> _Link | None:
        for name, quiet in QUIET.items():
            os.environ.setdefault(name, quiet)
        from mooncake.store import MooncakeDistributedStore

        store = MooncakeDistributedStore()
        code = store.setup(self._host, "P2PHANDSHAKE", 0, LOCAL_BUFFER, "tcp", "", self._address.master)
        if code:
            log.warning("the KV store at %s refuses a client: %s", self._address.master, code)
            return None
        lanes: dict[Kind, _Lane] = {"look": _Lane(ctypes.create_string_buffer(1), 1)}
        for kind in ("read", "write"):
            lane = _Lane(ctypes.create_string_buffer(self._buffer_bytes), self._buffer_bytes)
            if code := store.register_buffer(lane.address, lane.size):
                log.warning("the KV store can't register a buffer: %s", code)
                return None
            lanes[kind] = lane
        return _Link(store, lanes)


def _places(address: int, sizes: Sequence[int]) -> list[int]:
    """Where objects of these sizes begin when they lie one after the other."""
    return list(accumulate(sizes[:-1], initial=address))


def _checked(codes: Sequence[int]) -> list[int]:
    """Raises StoreFault for a code that says more than that an object is missing or the store is full."""
    for code in codes:
        if code < 0 and code not in (MISSING, NO_SPACE):
            raise StoreFault(f"error {code}")
    return list(codes)
