"""Several proxy processes behind one pair of sockets: opened once, inherited by each, started again when one dies.

The parent listens and never accepts: whichever child is free takes a connection, and one that is killed takes none with
it but its own. Children hold the reading end of a pipe whose writing end only the parent has: when the parent is gone,
however it went, they stop. Through another pipe a child says that it serves: one that ends with an error before any
has said so will not start at all, and then all end, however long a slow machine took to find out.

It knows nothing of what a child serves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

log = logging.getLogger(__name__)

BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0)
CALM_S = 30.0
"""A child that ran this long is started again at once."""
STOP_S = 8.0
"""Seconds between SIGTERM and SIGKILL."""


class Family:
    """``count`` children, each started with ``command``, ``--inherited`` (see ``inherited``) and ``--announce``, a file
    descriptor to which it writes once it serves."""

    def __init__(self, command: Sequence[str], sockets: Sequence[socket.socket], count: int) -> None:
        self._command, self._sockets, self._count = list(command), list(sockets), count
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._over: asyncio.Future[int]
        self._served = False
        """One of the children has served."""

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT. Returns the exit code: not 0 when the children can't start."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, 0)
        lifeline, holding = os.pipe()
        announced, announce = os.pipe()
        loop.add_reader(announced, self._note_serving, announced)
        inherits = [*(sock.fileno() for sock in self._sockets), lifeline]
        command = [*self._command, "--inherited", ",".join(map(str, inherits)), "--announce", str(announce)]
        handed = [*inherits, announce]
        tasks = [asyncio.create_task(self._keep(place, command, handed)) for place in range(self._count)]
        try:
            return await self._over
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(_stop(child) for child in self._children.values()))
            loop.remove_reader(announced)
            for end in (lifeline, holding, announced, announce):
                os.close(end)

    def _note_serving(self, announced: int) -> None:
        os.read(announced, 64)
        self._served = True

    def _end(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    async def _keep(self, place: int, command: list[str], handed: list[int]) -> None:
        failures = 0
        while True:
            started = time.monotonic()
            child = await asyncio.create_subprocess_exec(*command, pass_fds=handed, stdin=asyncio.subprocess.DEVNULL)
            self._children[place] = child
            code = await child.wait()
            lasted_s = time.monotonic() - started
            if code > 0 and not self._served:
                log.error("process %d ended with code %d before it served", child.pid, code)
                self._end(code)
                return
            failures = 0 if lasted_s > CALM_S else failures + 1
            log.warning("process %d ended with code %d; another is started", child.pid, code)
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])


async def _stop(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.terminate()
        try:
            await asyncio.wait_for(child.wait(), STOP_S)
        except TimeoutError:
            child.kill()
            await child.wait()


def inherited(text: str) -> list[socket.socket]:
    """In a child: the listening sockets. From now on SIGTERM reaches this process when its parent is gone."""
    *sockets, lifeline = (int(part) for part in text.split(","))

    def watch() -> None:
        os.read(lifeline, 1)  # nobody writes: it returns when the writing end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    return [socket.socket(fileno=number) for number in sockets]


def module_command(module: str, arguments: Sequence[str]) -> list[str]:
    """Command line of a module of this program."""
    return [sys.executable, "-m", module, *arguments]
