"""The scripted harness of `bench elastic` as a process: its plan decides what it does, not the policy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_chat_server import ScriptedChatServer, call
from test_mini_harness import TcpDoor

from tests.bench.elastic.paced_harness import Paced


@pytest.fixture
def script(folder: Path) -> Path:
    """As it lies in a sandbox, with what it needs beside it."""
    for bind in Paced(folder).binds():
        shutil.copy(bind.source, folder)
    return folder / "paced.py"


def test_it_makes_the_turns_of_its_session_whatever_is_answered(
    folder: Path, script: Path, chat: Callable[..., ScriptedChatServer]
) -> None:
    workspace = folder / "workspace"
    workspace.mkdir()
    mine = {"turns": [[5, 4, 0.2], [3, 2, 0.1], [4, 1, 0.0]], "reward": 0.25, "seed": 7}
    plan = {"words": ["red", "fox"], "sessions": {"other": 0, "mine": 1}, "episodes": [{**mine, "turns": []}, mine]}
    (workspace / "plan.json").write_text(json.dumps(plan))
    server = chat(call("submit"), {"role": "assistant", "content": "I am done."})
    door = TcpDoor(server.socket)
    began = time.monotonic()
    environment = {"OPENAI_BASE_URL": door.url, "OPENAI_API_KEY": "k", "OPENAI_MODEL": "policy"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", str(script)],
        cwd=workspace,
        env={**environment, "PATH": os.environ["PATH"], "PACED_SESSION": "mine"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    door.close()
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began > 0.3
    assert [request["max_tokens"] for request in server.requests] == [4, 2, 1]
    messages = server.requests[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert [len(message["content"].split()) for message in messages if message["role"] != "assistant"] == [5, 3, 4]
    assert (workspace / "reward.txt").read_text() == "0.25"


def test_without_a_plan_for_its_session_it_says_so(folder: Path, script: Path) -> None:
    (folder / "plan.json").write_text(json.dumps({"words": ["a"], "sessions": {}, "episodes": []}))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", str(script)],
        cwd=folder,
        env={"OPENAI_BASE_URL": "http://127.0.0.1:1", "OPENAI_API_KEY": "k", "OPENAI_MODEL": "m", "PACED_SESSION": "x"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2 and "cannot start" in done.stderr
