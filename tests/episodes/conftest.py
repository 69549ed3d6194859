"""Real parts for the episodes' tests: a Valkey, a task folder, an episode's folder, and what is left of its sandbox."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from episode_parts import EpisodesValkey
from scripted_chat_server import Answer, ScriptedChatServer

from infra.episodes.launch import EpisodeLaunch
from infra.sandbox.bubblewrap import Bubblewrap
from infra.tasks.harbor import Task, load_task


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[EpisodesValkey]:
    with tempfile.TemporaryDirectory(prefix="gyre-valkey-") as folder, EpisodesValkey(Path(folder)) as server:
        yield server


@pytest.fixture
def valkey(valkey_server: EpisodesValkey) -> EpisodesValkey:
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
def make_launch(folder: Path, valkey: EpisodesValkey, make_task: MakeTask) -> Callable[..., EpisodeLaunch]:
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
