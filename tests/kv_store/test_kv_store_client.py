"""A real Mooncake store: pages survive their writer, and a store that is away, frozen or dead keeps nobody."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.kv_store.arrival import Arrival
from infra.kv_store.client import StoreAddress, StoreClient
from infra.kv_store.commands import master_command, segment_command
from infra.kv_store.pages import cache_salt, object_name, page_digests, root_digest
from infra.settings import Settings
from tests.processes import free_pair
from workers.stack.doctor import Diagnosis, examine

pytestmark = pytest.mark.stack

HOST = "127.0.0.1"
PAGE = 4096
OPERATION_S = 1.0
START_S = 120.0


def until(condition: Callable[[], object], what: str, seconds: float = START_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


@dataclass
class Store:
    address: StoreAddress
    folder: Path
    master: subprocess.Popen[bytes] | None = None
    segment: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        port, socket = int(self.address.master.rsplit(":", 1)[1]), self.folder / "segment.sock"
        socket.unlink(missing_ok=True)
        with (self.folder / "store.log").open("ab") as log:
            self.master = subprocess.Popen(master_command(HOST, port, port + 1), stdout=log, stderr=log)
            command = segment_command(HOST, self.address.master, 64, socket)
            self.segment = subprocess.Popen(command, stdout=log, stderr=log)
        until(socket.exists, "the store's memory is mounted")

    def stop(self) -> None:
        for process in (self.segment, self.master):
            if process is not None:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    port = free_pair()
    store = Store(StoreAddress(f"{HOST}:{port}", f"http://{HOST}:{port + 1}"), tmp_path)
    yield store
    store.stop()


class Pages:
    """Memory of an engine: pages of two regions each."""

    def __init__(self, count: int, filled: bool) -> None:
        self.buffer = ctypes.create_string_buffer(os.urandom(count * PAGE) if filled else count * PAGE, count * PAGE)
        start = ctypes.addressof(self.buffer)
        half = PAGE // 2
        self.regions = [[(start + n * PAGE, half), (start + n * PAGE + half, half)] for n in range(count)]


def client_of(store: Store, buffer_bytes: int = 4 * PAGE) -> StoreClient:
    client = StoreClient(store.address, HOST, buffer_bytes=buffer_bytes, operation_s=OPERATION_S)
    client.start()
    return client


def took(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


async def test_pages_outlive_their_writer_and_a_reader_knows_when_they_are_there(store: Store) -> None:
    store.start()
    writer, reader = client_of(store), client_of(store)
    until(lambda: writer.connected and reader.connected, "connected")
    tokens, salt = list(range(1000, 1000 + 16 * 11 + 5)), cache_salt(3, "checksum")
    names = [object_name("space", digest) for digest in page_digests(tokens[: 16 * 11], root_digest(salt))]
    arrival = Arrival(store.address.http, "space")
    try:
        began = time.monotonic()
        assert not await arrival.wait(tokens, salt, 0.2)
        assert 0.2 <= time.monotonic() - began < 5
        pages = Pages(11, filled=True)
        assert writer.write(names, pages.regions) == [True] * 11
        assert await arrival.wait(tokens, salt, 5)
        assert not await arrival.wait(tokens, cache_salt(4, "checksum"), 0)
        writer.close()
        assert reader.look([*names, "other"]) == [True] * 11 + [False]
        copy = Pages(11, filled=False)
        assert reader.read(names, copy.regions) == 11
        assert copy.buffer.raw == pages.buffer.raw
        assert reader.read([*names[:5], "other", *names[6:]], Pages(11, filled=False).regions) == 5
    finally:
        await arrival.close()


async def test_an_engine_that_starts_without_a_store_uses_it_when_it_comes(store: Store) -> None:
    client = client_of(store)
    assert took(lambda: client.look(["a"])) < 0.5 and not client.connected
    arrival = Arrival(store.address.http, "space")
    assert not await arrival.wait(list(range(64)), "0", 30), "nobody waits for a store that isn't there"
    await arrival.close()
    store.start()
    until(lambda: client.connected, "connected")
    assert client.write(["a"], Pages(1, filled=True).regions) == [True]
    assert client.look(["a"]) == [True]


def test_a_frozen_store_keeps_nobody_for_long_and_is_used_again_when_it_thaws(store: Store) -> None:
    store.start()
    client, pages = client_of(store), Pages(4, filled=True)
    until(lambda: client.connected, "connected")
    assert client.write(["a"], pages.regions[:1]) == [True]
    assert store.master is not None
    store.master.send_signal(signal.SIGSTOP)
    assert took(lambda: client.look(["a"])) < OPERATION_S + 1
    began = time.monotonic()
    assert client.look(["a"]) == [False] and client.read(["a"], pages.regions[:1]) == 0
    assert client.write(["b"], pages.regions[1:2]) == [False]
    assert time.monotonic() - began < 0.5, "once is enough"
    store.master.send_signal(signal.SIGCONT)
    until(lambda: client.connected, "connected again")
    copy = Pages(1, filled=False)
    assert client.read(["a"], copy.regions) == 1
    assert copy.buffer.raw == pages.buffer.raw[:PAGE]


def test_dead_memory_is_like_an_empty_store(store: Store) -> None:
    store.start()
    client, pages = client_of(store), Pages(1, filled=True)
    until(lambda: client.connected, "connected")
    assert client.write(["a"], pages.regions) == [True]
    assert store.segment is not None
    store.segment.kill()
    copy = Pages(1, filled=False)
    assert took(lambda: client.read(["a"], copy.regions)) < OPERATION_S + 1
    assert copy.buffer.raw == b"\0" * PAGE


def test_an_object_that_fits_into_no_buffer_is_a_fault_of_use(store: Store) -> None:
    client = StoreClient(store.address, HOST, buffer_bytes=PAGE - 1)
    with pytest.raises(ValueError, match="does not fit"):
        client.write(["a"], Pages(1, filled=True).regions)


async def test_the_doctor_says_whether_an_external_store_answers(store: Store, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, kv_store_address=store.address.master)

    async def seen() -> Diagnosis:
        (finding,) = [finding for finding in await examine(settings) if finding.part == "kv store"]
        return finding

    absent = await seen()
    assert not absent.ok and store.address.http in absent.detail and "GYRE_KV_STORE_ADDRESS" in absent.mend
    store.start()
    assert (await seen()).ok
