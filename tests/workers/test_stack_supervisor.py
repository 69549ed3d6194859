"""The stack's supervisor with real processes: what dies is started again, what is ended leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil

from infra.episodes.processes import start_time
from infra.settings import Settings
from tests.processes import free_port
from workers.stack.local import end_leftovers, read_state
from workers.stack.processes import ProcessSpec, child_environment, local_stack
from workers.stack.supervisor import Stack

SERVER = """
import socketserver, sys
socketserver.TCPServer.allow_reuse_address = True
socketserver.TCPServer(("127.0.0.1", int(sys.argv[1])), socketserver.BaseRequestHandler).serve_forever()
"""
FORKS = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"


def server(name: str, after: tuple[str, ...] = ()) -> ProcessSpec:
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    return ProcessSpec(name, lambda: command, listens=("127.0.0.1", port), after=after)


async def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def supervised(settings: Settings, *specs: ProcessSpec) -> AsyncIterator[Stack]:
    stack = Stack(settings, specs)
    task = asyncio.create_task(stack.run())
    try:
        yield stack
    finally:
        stack.stop()
        await asyncio.wait_for(task, 30)


def pid(settings: Settings, name: str) -> int:
    state = read_state(settings)
    return int(state["processes"][name]["pid"]) if state else 0


def ready(settings: Settings, *names: str) -> bool:
    state = read_state(settings)
    return state is not None and all(state["processes"][name]["ready"] for name in names)


async def test_a_killed_process_is_started_again_and_counted(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    async with supervised(settings, server("one")):
        await until(lambda: ready(settings, "one"))
        before = pid(settings, "one")
        os.kill(before, signal.SIGKILL)
        await until(lambda: ready(settings, "one") and pid(settings, "one") != before)
        state = read_state(settings)
        assert state is not None and state["processes"]["one"]["restarts"] == 1
    assert read_state(settings) is None


async def test_a_process_waits_for_what_it_stands_on(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    never = ProcessSpec("never", lambda: [sys.executable, "-c", FORKS], listens=("127.0.0.1", free_port()))
    async with supervised(settings, never, server("late", after=("never",))):
        await until(lambda: pid(settings, "never") != 0)
        await asyncio.sleep(0.5)
        assert pid(settings, "late") == 0


async def test_ending_the_stack_ends_what_its_processes_started(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    async with supervised(settings, ProcessSpec("forks", lambda: [sys.executable, "-c", FORKS])):
        await until(lambda: ready(settings, "forks"))
        group = pid(settings, "forks")
        await until(lambda: len(members(group)) == 2)
    await until(lambda: not members(group))


def test_what_a_killed_supervisor_left_is_found_and_ended(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (tmp_path / "pids").mkdir()
    entry = {"pid": left.pid, "start_time": start_time(left.pid)}
    (tmp_path / "pids" / "left.json").write_text(json.dumps(entry))
    (tmp_path / "pids" / "reused.json").write_text(json.dumps({"pid": os.getpid(), "start_time": 1}))
    assert end_leftovers(settings) == ["left"]
    assert left.wait(10) == -signal.SIGKILL


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def test_an_external_temporal_and_redis_are_not_started(tmp_path: Path) -> None:
    external = Settings(home=tmp_path, temporal_address="temporal.example:7233", redis_url="redis://redis.example/0")
    assert not {"temporal", "valkey"} & {spec.name for spec in local_stack(external)}
    assert external.temporal == "temporal.example:7233" and external.redis == "redis://redis.example/0"
    assert {"temporal", "valkey"} <= {spec.name for spec in local_stack(Settings(home=tmp_path))}


def test_every_process_gets_the_same_settings_wherever_it_starts(tmp_path: Path) -> None:
    settings = Settings(home=Path("relative"), cells=3)
    environment = child_environment(settings)
    assert set(environment) >= {f"GYRE_{name.upper()}" for name in Settings.model_fields}
    assert Path(environment["GYRE_HOME"]).is_absolute()
    assert environment["OMP_NUM_THREADS"] == "1"
    assert [name for name in settings.cell_names()] == ["cell-0", "cell-1", "cell-2"]
