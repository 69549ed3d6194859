"""What benches start and ask: the scripted engine as a process, and a harness's connection."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from workers.errors import UsageError

START_S = 60.0


@asynccontextmanager
async def engine_server(tokenizer: Path, delay_s: float = 0.0) -> AsyncIterator[int]:
    """The port of a scripted engine whose turns take so many seconds. Raises UsageError."""
    command = [sys.executable, "-m", "tests.bench.engine_server", "--tokenizer", str(tokenizer.absolute())]
    process = await asyncio.create_subprocess_exec(*command, "--delay", str(delay_s), stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        if not line:
            raise UsageError("the scripted engine does not start: see above")
        yield int(json.loads(line)["port"])
    finally:
        process.stdin.close()  # upon which it ends
        await process.wait()


class BlockingHarness:
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
