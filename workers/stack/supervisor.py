"""The local stack's supervisor: `python -m workers.stack.supervisor`, started detached by `gyre up`.

It starts every process of `workers.stack.processes`, restarts one that ends, and ends them all on SIGTERM, those that
others stand on last. What it knows is in ``home/stack.json`` for `gyre status`; each process it started is also in
``home/pids/NAME.json`` (pid and start time), so that `gyre down` can end what a killed supervisor left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from infra.episodes.processes import start_time
from infra.files import write_whole
from infra.quota import Quota, set_quota
from infra.settings import Settings
from workers.stack.processes import ProcessSpec, local_stack, quota_name

log = logging.getLogger("gyre.stack")

READY_S = 240.0
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
CALM_S = 60.0
"""A process that ran this long is restarted without back-off again."""


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=1))


@dataclass
class Supervised:
    spec: ProcessSpec
    process: asyncio.subprocess.Process | None = None
    restarts: int = -1
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = 0.0


class Stack:
    def __init__(self, settings: Settings, specs: Sequence[ProcessSpec]) -> None:
        self._settings = settings
        self._children = {spec.name: Supervised(spec) for spec in specs}
        self._stopping = asyncio.Event()
        self._quotas: dict[str, Quota] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        for folder in ("logs", "pids", "valkey", "workers", "proxy", "episodes"):
            (self._settings.root / folder).mkdir(parents=True, exist_ok=True)
        for cell in self._settings.cell_names():
            (self._settings.root / "cells" / cell).mkdir(parents=True, exist_ok=True)
        if self._settings.cell_cpu:
            for cell in self._settings.cell_names():
                self._quotas[cell] = set_quota(quota_name(self._settings, cell), self._settings.cell_cpu)
                self._quotas[cell].lift()  # a start takes many times what serving does
        tasks = [asyncio.create_task(self._supervise(child)) for child in self._children.values()]
        if self._quotas:
            tasks.append(asyncio.create_task(self._hold_cells()))
        await self._stopping.wait()
        self._report()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        needed = {name for child in self._children.values() for name in child.spec.after}
        for last in (False, True):  # what others stand on ends after them
            ending = [child for name, child in self._children.items() if (name in needed) is last]
            await asyncio.gather(*(self._stop(child) for child in ending))
        for cell, quota in self._quotas.items():
            if not await asyncio.to_thread(quota.remove):
                log.warning("the control group of %s stays: %s runs in it", cell, quota.processes())
        (self._settings.root / "stack.json").unlink(missing_ok=True)

    def stop(self) -> None:
        """End every process, and then ``run``."""
        self._stopping.set()

    async def _supervise(self, child: Supervised) -> None:
        for name in child.spec.after:
            await self._children[name].ready.wait()
        failures = 0
        while True:
            await self._start(child)
            ready = asyncio.create_task(self._wait_ready(child))
            assert child.process is not None
            code = await child.process.wait()
            ready.cancel()
            child.ready.clear()
            kill_group(child.process.pid)
            failures = 0 if time.monotonic() - child.started > CALM_S else failures + 1
            log.warning("%s ended with code %s; it is started again", child.spec.name, code)
            self._report()
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])

    async def _hold_cells(self) -> None:
        for child in self._children.values():
            await child.ready.wait()
        for quota in self._quotas.values():
            quota.hold()

    async def _start(self, child: Supervised) -> None:
        spec = child.spec
        if spec.socket is not None:
            spec.socket.unlink(missing_ok=True)
        with (self._settings.logs / f"{spec.name}.log").open("ab") as output:
            quota = self._quotas.get(spec.cell)
            child.process = await asyncio.create_subprocess_exec(
                *(quota.command(spec.command()) if quota is not None else spec.command()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(spec.environment()),
                start_new_session=True,  # its own group, so that what it starts can be ended with it
            )
        child.started = time.monotonic()
        child.restarts += 1
        pid = child.process.pid
        write_json(self._pid_file(spec.name), {"pid": pid, "start_time": start_time(pid)})
        self._report()

    async def _wait_ready(self, child: Supervised) -> None:
        while not await is_ready(child.spec):
            await asyncio.sleep(0.1)
        child.ready.set()
        self._report()

    async def _stop(self, child: Supervised) -> None:
        process = child.process
        if process is not None:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), child.spec.stop_s)
                except TimeoutError:
                    log.warning("%s does not end by itself and is killed", child.spec.name)
            kill_group(process.pid)
        self._pid_file(child.spec.name).unlink(missing_ok=True)

    def _pid_file(self, name: str) -> Path:
        return self._settings.root / "pids" / f"{name}.json"

    def _report(self) -> None:
        processes = {
            name: {
                "pid": child.process.pid if child.process is not None else 0,
                "ready": child.ready.is_set(),
                "restarts": max(0, child.restarts),
            }
            for name, child in self._children.items()
        }
        state = {
            "pid": os.getpid(),
            "start_time": start_time(os.getpid()),
            "stopping": self._stopping.is_set(),
            "settings": self._settings.model_dump(mode="json"),
            "processes": processes,
        }
        write_json(self._settings.root / "stack.json", state)


def kill_group(pgid: int) -> None:
    """SIGKILL to a process group; gone already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, signal.SIGKILL)


async def is_ready(spec: ProcessSpec) -> bool:
    """Whether the process answers where its spec says that it will."""
    try:
        if spec.http:
            timeout = aiohttp.ClientTimeout(total=5)
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(spec.http) as answer:
                return answer.status == 200
        if spec.socket is not None:
            _, writer = await asyncio.open_unix_connection(str(spec.socket))
        elif spec.listens is not None:
            _, writer = await asyncio.open_connection(*spec.listens)
        else:
            return True
        writer.close()
    except (OSError, aiohttp.ClientError, TimeoutError):
        return False
    return True


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings = Settings()
    asyncio.run(Stack(settings, local_stack(settings)).run())


if __name__ == "__main__":
    main()
