"""Tensors move between real processes that are killed, stopped and overwritten meanwhile.

Without libibverbs1 these tests fail, all of them: there is no other transport to fall back to.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from transfer_source import At, Source, version_tensors

from infra.transfer.endpoint import TensorPublisher, TornRead, pull
from infra.transfer.manifest import TransferManifest, checksum
from infra.transfer.mooncake import MooncakeEndpoint, SourceLost, TransferError, TransferStalled

pytestmark = pytest.mark.stack

MIB = 32
"""Of a publication of versions: 33 chunks, of which at most 8 are in flight."""


@pytest.fixture(scope="module")
def endpoint() -> MooncakeEndpoint:
    """One for all scenarios: whatever happened in one, the next uses the same."""
    return MooncakeEndpoint()


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.close()


@pytest.fixture(scope="module")
def victims() -> Iterator[list[Source]]:
    victims: list[Source] = []
    yield victims
    for victim in victims:
        victim.close()


@pytest.fixture
def victim(victims: list[Source]) -> Iterator[Source]:
    """A source that may be killed or stopped."""
    if not victims or not victims[-1].alive:
        victims.append(Source())
    yield victims[-1]
    if victims[-1].alive:
        victims[-1].signal(signal.SIGCONT)


def assert_version(tensors: dict[str, torch.Tensor], version: int, mib: int = MIB) -> None:
    assert checksum(tensors) == checksum(version_tensors(version, mib))


def test_tensors_of_every_kind_arrive_as_they_were(endpoint: MooncakeEndpoint, source: Source) -> None:
    random = torch.Generator().manual_seed(1)
    sent = {
        "fp32": torch.randn(300, 701, generator=random),
        "bf16": torch.randn(65, 33, generator=random).to(torch.bfloat16),
        "int64": torch.randint(-(2**62), 2**62, (7, 5, 3), generator=random),
        "odd bytes": torch.arange(13, dtype=torch.uint8),
        "mask": torch.rand(11, generator=random) > 0.5,
        "scalar": torch.tensor(-0.0, dtype=torch.float64),
        "no rows": torch.empty(0, 17),
        "nothing": torch.empty(0, dtype=torch.int64),
        "transposed": torch.randn(40, 30, generator=random).T,
        "ü/名": torch.full((3, 1, 1), float("nan")),
    }
    manifest = TransferManifest.model_validate_json(source.publish("kinds", sent).model_dump_json())
    received = pull(endpoint, manifest, deadline_s=10)
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert (received[name].dtype, received[name].shape) == (tensor.dtype, tensor.shape)
    assert checksum(received) == checksum(sent)


@pytest.mark.parametrize("sent", [{}, {"nothing": torch.empty(4, 0)}], ids=["no tensors", "no bytes"])
def test_an_empty_publication_is_a_publication(
    endpoint: MooncakeEndpoint, source: Source, sent: dict[str, torch.Tensor]
) -> None:
    assert checksum(pull(endpoint, source.publish("empty", sent), deadline_s=10)) == checksum(sent)


def test_a_process_pulls_from_itself(endpoint: MooncakeEndpoint) -> None:
    publisher = TensorPublisher(endpoint)
    manifest = publisher.publish("own", version_tensors(3, 1))
    assert_version(pull(endpoint, manifest, deadline_s=10), 3, 1)
    publisher.withdraw("own")
    publisher.withdraw("own")


def test_memory_released_twice_is_released_once(endpoint: MooncakeEndpoint) -> None:
    buffer = endpoint.allocate(64)
    endpoint.release(buffer)
    endpoint.release(buffer)
    endpoint.release(endpoint.allocate(64))


def test_source_stopped_mid_read_stalls_and_its_late_bytes_hit_nothing(
    endpoint: MooncakeEndpoint, source: Source, victim: Source
) -> None:
    manifest = victim.publish_versions("weights", [1], MIB)
    with At(endpoint, 20, victim.stop):
        began = time.monotonic()
        with pytest.raises(TransferStalled):
            pull(endpoint, manifest, deadline_s=20, stall_s=1)
        assert 1 <= time.monotonic() - began < 3
    assert endpoint.quarantined_bytes > MIB << 20
    later = [pull(endpoint, source.publish_versions("weights", [v], MIB), deadline_s=10) for v in (2, 3, 4)]
    assert endpoint.quarantined_bytes > MIB << 20
    victim.signal(signal.SIGCONT)
    assert_version(pull(endpoint, manifest, deadline_s=20), 1)  # the thawed source is a source again
    deadline = time.monotonic() + 10
    while endpoint.quarantined_bytes:
        assert time.monotonic() < deadline, "the late reads never ended"
        endpoint.release(endpoint.allocate(64))
    for version, tensors in enumerate(later, start=2):
        assert_version(tensors, version)


def test_first_contact_with_a_stopped_source_blocks_nobody(source: Source, victim: Source) -> None:
    endpoint = MooncakeEndpoint()  # one that has met neither
    manifest = victim.publish_versions("weights", [1], 1)
    victim.stop()
    began = time.monotonic()
    with pytest.raises(TransferStalled):
        pull(endpoint, manifest, deadline_s=20, stall_s=0.5)
    assert_version(pull(endpoint, source.publish_versions("weights", [2], 1), deadline_s=10), 2, 1)
    assert time.monotonic() - began < 3


def _stalled_reader(manifest: TransferManifest) -> None:
    endpoint = MooncakeEndpoint()
    try:
        pull(endpoint, manifest, deadline_s=5, stall_s=0.3)
    except TransferStalled:
        sys.exit(7)


def test_a_reader_exits_cleanly_while_a_stopped_source_owes_it_an_answer(victim: Source) -> None:
    manifest = victim.publish_versions("weights", [1], 1)
    victim.stop()
    reader = multiprocessing.get_context("spawn").Process(target=_stalled_reader, args=(manifest,), daemon=True)
    reader.start()
    reader.join(20)
    assert reader.exitcode == 7


def test_source_killed_mid_read(endpoint: MooncakeEndpoint, source: Source, victim: Source) -> None:
    manifest = victim.publish_versions("weights", [1], MIB)
    with At(endpoint, 20, victim.kill):
        began = time.monotonic()
        with pytest.raises((SourceLost, TransferStalled)):
            pull(endpoint, manifest, deadline_s=20, stall_s=3)
        assert time.monotonic() - began < 6
    assert_version(pull(endpoint, source.publish_versions("weights", [2], MIB), deadline_s=10), 2)


def test_manifest_of_a_dead_source_fails_at_once(endpoint: MooncakeEndpoint, victim: Source) -> None:
    never_met, met = victim.publish_versions("a", [1], 1), victim.publish_versions("b", [1], 1)
    victim.kill()
    began = time.monotonic()
    with pytest.raises(SourceLost):
        pull(endpoint, never_met, deadline_s=20)
    with pytest.raises(SourceLost):
        pull(endpoint, met.model_copy(update={"session": "127.0.0.1:1"}), deadline_s=20)
    assert time.monotonic() - began < 2


def test_deadline_holds_while_bytes_keep_coming(endpoint: MooncakeEndpoint, source: Source) -> None:
    manifest = source.publish_versions("weights", [1], MIB)
    began = time.monotonic()
    slowly = At(endpoint, 2, lambda: time.sleep(0.05), on=True)  # slower than the reads: each look finds some ended
    with slowly, pytest.raises(TransferStalled, match="deadline"):
        pull(endpoint, manifest, deadline_s=0.6)
    assert time.monotonic() - began < 1.5
    assert_version(pull(endpoint, manifest, deadline_s=10), 1)


def test_the_next_publication_does_not_disturb_readers_of_the_last(endpoint: MooncakeEndpoint, source: Source) -> None:
    manifest = source.publish_versions("double", [1], MIB)
    with At(endpoint, 20, lambda: source.publish_versions("double", [2], MIB)):
        assert_version(pull(endpoint, manifest, deadline_s=10), 1)
    assert_version(pull(endpoint, manifest, deadline_s=10), 1)


@pytest.mark.parametrize("mib", [MIB, MIB // 2, MIB + 8], ids=["same size", "smaller", "larger"])
def test_publications_that_overwrite_a_reader_are_noticed(endpoint: MooncakeEndpoint, source: Source, mib: int) -> None:
    manifest = source.publish_versions("overwritten", [1], MIB)
    expected = TornRead if mib == MIB else TransferError  # other sizes need other memory: the old may be gone
    with At(endpoint, 20, lambda: source.publish_versions("overwritten", [2, 3, 4], mib)), pytest.raises(expected):
        pull(endpoint, manifest, deadline_s=10)
    began = time.monotonic()
    with pytest.raises(expected, match="no longer holds" if mib == MIB else None):
        pull(endpoint, manifest, deadline_s=10)
    assert time.monotonic() - began < 5
    source.ask("withdraw", "overwritten")


def test_pulls_while_a_source_never_stops_publishing(endpoint: MooncakeEndpoint, source: Source) -> None:
    """Each pull gives the version of its manifest, whole, or TornRead; never a mixture."""
    outcomes = {"whole": 0, "torn": 0}
    began, version = time.monotonic(), 1
    while time.monotonic() - began < 2:
        manifest = source.publish_versions("busy", [version], 16)
        source.begin("publish_until_told", "busy", version + 1, 16)
        try:
            assert_version(pull(endpoint, manifest, deadline_s=10), version, 16)
            outcomes["whole"] += 1
        except TornRead:
            outcomes["torn"] += 1
        source.begin("stop publishing")
        version = source.answer()
    assert sum(outcomes.values()) > 2, outcomes


def test_bytes_that_are_wrong_for_good_are_refused(endpoint: MooncakeEndpoint, source: Source) -> None:
    manifest = source.publish_versions("damaged", [1], 4)
    source.ask("flip_bit", "damaged", 3_000_000)
    with pytest.raises(TornRead, match="1 chunks"):
        pull(endpoint, manifest, deadline_s=10)


def test_a_chunk_that_was_wrong_once_is_read_again(endpoint: MooncakeEndpoint, source: Source) -> None:
    manifest = source.publish_versions("hurt", [1], 4)
    source.ask("flip_bit", "hurt", 3_000_000)
    first_pass = 1 + len(manifest.digests)  # the identity and each chunk
    with At(endpoint, first_pass + 1, lambda: source.ask("flip_bit", "hurt", 3_000_000)):
        assert_version(pull(endpoint, manifest, deadline_s=10), 1, 4)


def test_a_withdrawn_publication_cannot_be_pulled(endpoint: MooncakeEndpoint, source: Source) -> None:
    manifest, other = source.publish_versions("gone", [1], 1), source.publish_versions("kept", [2], 1)
    source.ask("withdraw", "gone")
    began = time.monotonic()
    with pytest.raises(TransferError):
        pull(endpoint, manifest, deadline_s=10)
    assert time.monotonic() - began < 5
    assert_version(pull(endpoint, other, deadline_s=10), 2, 1)


class Relay:
    """A port that stands for whichever process it is pointed at, as a port does that one process after another binds.

    Only handshakes and probes pass here; the engines exchange data on a port that they tell each other.
    """

    def __init__(self) -> None:
        self.to = ""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.session = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self.to.rpartition(":")
            server = socket.create_connection((host, int(port)), timeout=5)
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=pair, daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_a_new_process_at_a_dead_ones_port_is_read(endpoint: MooncakeEndpoint, source: Source, victim: Source) -> None:
    """The engine keeps what it learnt of a port's former owner; a reader must not be sent there for ever."""
    relay = Relay()
    try:
        first, second = (process.publish_versions("weights", [1], MIB) for process in (victim, source))
        relay.to = first.session
        assert_version(pull(endpoint, first.model_copy(update={"session": relay.session}), deadline_s=10), 1)
        victim.kill()
        relay.to = second.session
        for _ in range(2):
            began = time.monotonic()
            assert_version(pull(endpoint, second.model_copy(update={"session": relay.session}), deadline_s=10), 1)
            assert time.monotonic() - began < 3
    finally:
        relay.close()


def test_a_forked_child_is_told_to_spawn(endpoint: MooncakeEndpoint) -> None:
    child = os.fork()
    if child == 0:
        try:
            endpoint.allocate(64)
        except TransferError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
