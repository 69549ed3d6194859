"""Real cells for a benchmark: engines of one policy, the KV store that they share, and routes to them.

Everything is as the local stack starts it, but for the workflows: routes are set here. It ends with its context, and
whatever the engines started ends with them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from infra.kv_store.client import StoreAddress
from infra.kv_store.commands import master_command, segment_command
from infra.kv_store.pages import read_config
from infra.sglang.client import EngineClient
from infra.sglang.launch import engine_command, engine_environment
from infra.sglang.weights import checkpoint_shapes
from infra.state.routes import get_route
from tests.processes import free_pair, free_port
from workers.errors import UsageError
from workers.stack.partial import PartialStack

HOST = "127.0.0.1"
ENGINE_S = 600.0
STORE_S = 60.0
KV_TOKENS, CONTEXT = 65_536, 8192


class BenchCells:
    """``stack`` holds the routes; ``store_mb`` is the store's memory, 0 for no store."""

    def __init__(self, stack: PartialStack, folder: Path, policy: Path, names: Sequence[str], *, store_mb: int) -> None:
        self._stack, self._folder, self._policy, self._store_mb = stack, folder, policy, store_mb
        self._names, self._vocabulary = list(names), int(read_config(policy)["vocab_size"])
        self._urls: dict[str, str] = {}
        self._processes = AsyncExitStack()
        self._store_processes: list[subprocess.Popen[bytes]] = []
        self._engine_processes: dict[str, subprocess.Popen[bytes]] = {}
        self.engines: dict[str, EngineClient] = {}
        self.store: StoreAddress | None = None

    @property
    def settings(self) -> Mapping[str, str]:
        """What a proxy needs to know of the store (``GYRE_*``)."""
        return {} if self.store is None else {"GYRE_KV_STORE_ADDRESS": self.store.master}

    async def __aenter__(self) -> Self:
        try:
            if self._store_mb:
                await self._start_store()
            for name in self._names:
                self._start_engine(name)
            for name in self._names:
                await self._wait_ready(name)
        except BaseException:
            await self._processes.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._processes.aclose()

    async def serve(self, cell: str, version: int = 0, weights: str = "") -> None:
        """Open the cell's route."""
        await self._set(cell, open=True, version=version, weights=weights)

    async def drain(self, cell: str) -> None:
        """Close the cell's route: its calls go elsewhere."""
        before = await get_route(self._stack.redis, cell)
        assert before is not None
        await self._set(cell, open=False, version=before.version, weights=before.weights)

    def kill_store(self) -> None:
        """SIGKILL to the store's master and to its memory."""
        for process in self._store_processes:
            process.kill()
            process.wait()

    async def _set(self, cell: str, **values: object) -> None:
        await self._stack.set_route(cell, url=self._urls[cell], incarnation=f"{cell}-bench", **values)

    async def _start_store(self) -> None:
        port = free_pair()
        self.store = StoreAddress(f"{HOST}:{port}", f"http://{HOST}:{port + 1}")
        mounted = self._folder / "segment.sock"
        master = self._start("kv-store-master", master_command(HOST, port, port + 1), os.environ)
        segment = self._start("kv-store", segment_command(HOST, self.store.master, self._store_mb, mounted), os.environ)
        self._store_processes = [master, segment]
        deadline = time.monotonic() + STORE_S
        while not mounted.exists():
            if time.monotonic() > deadline or segment.poll() is not None:
                raise UsageError(f"the KV store does not start: {self._log('kv-store')}")
            await asyncio.sleep(0.05)

    def _start_engine(self, name: str) -> None:
        scratch = self._folder / name
        scratch.mkdir()
        port = free_port()
        self._urls[name] = f"http://{HOST}:{port}"
        command = engine_command(
            self._policy.absolute(),
            HOST,
            port,
            max_total_tokens=KV_TOKENS,
            context_length=CONTEXT,
            incarnation=f"{name}-bench",
            kv_store=self.store,
        )
        self._engine_processes[name] = self._start(name, command, engine_environment(scratch))
        shapes = checkpoint_shapes(self._policy)
        client = EngineClient(self._urls[name], vocab_size=self._vocabulary, weight_shapes=shapes)
        self.engines[name] = client
        self._processes.push_async_callback(client.close)

    async def _wait_ready(self, name: str) -> None:
        deadline = time.monotonic() + ENGINE_S
        while not await self.engines[name].ready():
            if time.monotonic() > deadline or self._engine_processes[name].poll() is not None:
                raise UsageError(f"the engine of {name} does not start: {self._log(name)}")
            await asyncio.sleep(0.25)

    def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        log = (self._folder / f"{name}.log").open("wb")
        self._processes.callback(log.close)
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # its own group, so that what it starts can be ended with it
        )
        self._processes.callback(_end_group, process)
        return process

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-800:]


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
