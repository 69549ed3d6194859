"""A process that publishes tensors on command, and the handle with which a test drives (stops, kills) it.

Every value of version v's float tensors is v, so that a mixture of versions shows in any two elements.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from infra.transfer.endpoint import TensorPublisher
from infra.transfer.manifest import TransferManifest
from infra.transfer.mooncake import MooncakeEndpoint

CHUNK_BYTES = 1 << 20


def version_tensors(version: int, mib: int) -> dict[str, torch.Tensor]:
    """``mib`` MiB in all, in fp32 and bf16, and a step counter."""
    half = mib << 19
    return {
        "layer.weight": torch.full((half // 4,), float(version)),
        "layer.gate": torch.full((half // 2,), float(version), dtype=torch.bfloat16),
        "version": torch.tensor(version),
    }


def serve(commands: Connection) -> None:
    torch.set_num_threads(1)
    publisher = TensorPublisher(MooncakeEndpoint(), chunk_bytes=CHUNK_BYTES)
    while True:
        command, *arguments = commands.recv()
        if command == "publish":
            name, tensors = arguments
            commands.send(publisher.publish(name, tensors))
        elif command == "publish_versions":
            name, versions, mib = arguments
            manifests = [publisher.publish(name, version_tensors(version, mib)) for version in versions]
            commands.send(manifests[-1])
        elif command == "publish_until_told":
            name, version, mib = arguments
            while not commands.poll():
                publisher.publish(name, version_tensors(version, mib))
                version += 1
            commands.send(version)
        elif command == "withdraw":
            publisher.withdraw(arguments[0])
            commands.send(None)
        elif command == "flip_bit":  # damage behind the publisher's back
            name, position = arguments
            publisher._slots[name][-1][position] ^= 1
            commands.send(None)


class Source:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, *command: Any) -> None:
        self._pipe.send(command)

    def answer(self, timeout: float = 30) -> Any:
        assert self._pipe.poll(timeout), "the source does not answer"
        return self._pipe.recv()

    def ask(self, *command: Any) -> Any:
        self.begin(*command)
        return self.answer()

    def publish(self, name: str, tensors: dict[str, torch.Tensor]) -> TransferManifest:
        manifest: TransferManifest = self.ask("publish", name, tensors)
        return manifest

    def publish_versions(self, name: str, versions: list[int], mib: int) -> TransferManifest:
        manifest: TransferManifest = self.ask("publish_versions", name, versions, mib)
        return manifest

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        """SIGSTOP, and wait until every thread has stopped."""
        self.signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")
        deadline = time.monotonic() + 5
        while any(stat.read_text().rsplit(")", 1)[1].split()[0] != "T" for stat in tasks.glob("*/stat")):
            assert time.monotonic() < deadline, "the source does not stop"
            time.sleep(0.001)

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def close(self) -> None:
        self.kill()
        self._pipe.close()


class At:
    """Stands before an endpoint's engine and acts just before the n-th read is submitted: mid-transfer, always.

    ``on``: it acts before every later one too.
    """

    def __init__(
        self, endpoint: MooncakeEndpoint, submission: int, action: Callable[[], object], *, on: bool = False
    ) -> None:
        self._endpoint, self._engine = endpoint, endpoint._engine
        self._left, self._action, self._on = submission, action, on

    def __enter__(self) -> None:
        self._endpoint._engine = self

    def __exit__(self, *_: object) -> None:
        self._endpoint._engine = self._engine

    def batch_transfer_async_read(self, *arguments: Any) -> int:
        self._left -= 1
        if self._left == 0 or (self._on and self._left < 0):
            self._action()
        transfer: int = self._engine.batch_transfer_async_read(*arguments)
        return transfer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
