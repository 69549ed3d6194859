"""What tests and benches start of a stack as real processes: the proxy. And ports for them."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import psutil

from infra.settings import Settings
from infra.state import keys
from infra.state.redis import redis_client
from workers.errors import UsageError
from workers.stack.local import busy_ports

CHECKOUT = Path(__file__).parents[1]
STACK_PORTS = 300
"""Ports that a stack may take from its first one on."""
START_S = 60.0
END_S = 20.0


def free_port() -> int:
    """A loopback port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_pair() -> int:
    """A port that is free, like the one after it. Not one of those that the kernel gives to connections: a client that
    looks for a server there before it is up may find itself."""
    while True:
        port = random.randrange(20_000, 30_000)
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


def free_settings(home: Path, port_base: int | None = None, **values: object) -> Settings:
    """Settings of a stack whose ports nobody uses. Raises UsageError."""
    bases = [port_base] if port_base else random.sample(range(20_000, 55_000, STACK_PORTS), 50)
    for base in bases:
        settings = Settings.model_validate({"home": home, "port_base": base, **values})
        if not busy_ports(settings):
            return settings
    raise UsageError(f"no free ports from {bases[0]} on")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class ProxyProcess:
    """The proxy on a port and a unix socket; ``process`` is the parent where several processes serve."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, path: Path) -> None:
        self.process, self.port, self.path = process, port, path
        self.url = f"http://127.0.0.1:{port}"

    def children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children()
        return children

    def serving(self) -> list[psutil.Process]:
        """The processes that answer."""
        return self.children() or [psutil.Process(self.process.pid)]

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.terminate()
            await asyncio.wait_for(self.process.wait(), END_S)


@asynccontextmanager
async def proxy_process(
    redis_url: str,
    policy: Path,
    home: Path,
    *arguments: str,
    processes: int = 1,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[ProxyProcess]:
    """A proxy whose processes have all registered; it ends with the context. ``settings`` are more ``GYRE_*``
    variables. Raises UsageError.
    """
    port = free_port()
    environment = os.environ | {
        "GYRE_HOME": str(home),
        "GYRE_PORT_BASE": str(port - 20),
        "GYRE_REDIS_URL": redis_url,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **settings,
    }
    command = [sys.executable, "-m", "proxy.main", "--policy", str(policy.absolute()), "--processes", str(processes)]
    home.mkdir(parents=True, exist_ok=True)
    log = home / "proxy.log"
    async with aclosing(redis_client(redis_url)) as redis:
        expected = await redis.scard(keys.PROXIES) + processes
        with log.open("wb") as stream:
            process = await asyncio.create_subprocess_exec(
                *command, *arguments, env=environment, cwd=CHECKOUT, stdin=DEVNULL, stdout=stream, stderr=stream
            )
        proxy = ProxyProcess(process, port, home / "proxy" / "proxy.sock")
        try:
            deadline = time.monotonic() + START_S
            while not (listens(port) and await redis.scard(keys.PROXIES) >= expected):
                if process.returncode is not None or time.monotonic() > deadline:
                    raise UsageError(f"the proxy does not start: {log.read_text()[-800:]}")
                await asyncio.sleep(0.02)
            yield proxy
        finally:
            await proxy.end()
