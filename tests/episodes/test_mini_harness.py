"""The small agent as a process against a scripted server: its conversation, its tools, its patience."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_chat_server import Answer, ScriptedChatServer, call, raw_call, refusal

from infra.harness import mini

SCRIPT = Path(mini.__file__)


class TcpDoor:
    """What the relay does in a sandbox: loopback to unix socket. ``drops`` connections are closed at once."""

    def __init__(self, target: Path) -> None:
        self.target, self.drops = target, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.drops:
                self.drops -= 1
                client.close()
                continue
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(self.target))
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


class Mini:
    def __init__(self, folder: Path, chat: Callable[..., ScriptedChatServer]) -> None:
        self.workspace = folder / "workspace"
        self.workspace.mkdir()
        self.chat = chat
        self.doors: list[TcpDoor] = []

    def run(self, *script: Answer, drops: int = 0, **environment: str) -> tuple[int, str, ScriptedChatServer]:
        server = self.chat(*script)
        door = TcpDoor(server.socket)
        door.drops = drops
        self.doors.append(door)
        variables = {
            "OPENAI_BASE_URL": door.url,
            "OPENAI_API_KEY": "k",
            "OPENAI_MODEL": "policy",
            "PATH": os.environ["PATH"],
        }
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-B", str(SCRIPT), " do", "it \n"],
            cwd=self.workspace,
            env={**variables, **environment},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.returncode, done.stderr, server


@pytest.fixture
def agent(folder: Path, chat: Callable[..., ScriptedChatServer]) -> Iterator[Mini]:
    made = Mini(folder, chat)
    yield made
    for door in made.doors:
        door.close()


def test_a_conversation_is_the_task_then_turns_and_results_over_one_connection(agent: Mini) -> None:
    turns = [
        call("bash", command="echo hi; echo no >&2"),
        call("write_file", path="a.txt", content="x\n"),
        call("submit"),
    ]
    code, _, server = agent.run(*turns)
    assert code == 0
    assert server.connections == 1
    assert [tool["function"]["name"] for tool in server.requests[0]["tools"]] == [
        "bash",
        "write_file",
        "edit_file",
        "submit",
    ]
    first, last = server.requests[0]["messages"], server.requests[-1]["messages"]
    assert first == [{"role": "user", "content": "do it"}]
    assert set(server.requests[0]) == {"model", "messages", "tools"} and server.requests[0]["model"] == "policy"
    assert server.keys == ["Bearer k"] * 3
    assert last[1] == turns[0] and last[3] == turns[1]
    assert last[2] == {"role": "tool", "tool_call_id": "call-bash", "content": "hi\nno"}
    assert (agent.workspace / "a.txt").read_text() == "x\n"


def test_the_policys_mistakes_are_answers(agent: Mini) -> None:
    (agent.workspace / "a.txt").write_text("one two one")
    _, _, server = agent.run(
        call("edit_file", path="a.txt", old="one", new="1"),
        call("edit_file", path="a.txt", old="absent", new="1"),
        call("edit_file", path="b.txt", old="one", new="1"),
        call("write_file", path="no/b.txt", content="x"),
        call("write_file", path=".", content="x"),
        call("write_file", path="b.txt"),
        raw_call("bash", "{not json"),
        raw_call("bash", '["command"]'),
        raw_call("bash", '{"command": 3}'),
        call("fly"),
        call("bash", command="printf '%0300d\\n\\n' 0"),
        call("bash", command="exit 3"),
    )
    assert server.tool_outputs() == [
        "ok",
        "error: old not found",
        "error: no such file",
        "error: no such file",
        "error: cannot use file",
        "error: bad arguments",
        "error: bad arguments",
        "error: bad arguments",
        "error: bad arguments",
        "error: unknown tool",
        "0" * 160,
        "",
    ]
    assert (agent.workspace / "a.txt").read_text() == "1 two one"


def test_a_command_that_hangs_is_killed_and_one_that_leaves_a_service_is_not_waited_for(agent: Mini) -> None:
    start = time.monotonic()
    _, _, server = agent.run(
        call("bash", command="echo a; sleep 60"),
        call("bash", command="yes"),
        call("bash", command="sleep 60 & echo started"),
        call("bash", command="yes | head -n 1"),
        call("bash", command="echo $OPENAI_API_KEY-"),
        MINI_TOOL_TIMEOUT="0.5",
    )
    assert server.tool_outputs() == ["error: timeout", "error: timeout", "started", "y", "-"]
    assert time.monotonic() - start < 10


def test_several_calls_of_one_turn_are_answered_in_order(agent: Mini) -> None:
    both: dict[str, Any] = call("bash", command="echo 1")
    both["tool_calls"] += call("write_file", path="a", content="b")["tool_calls"]
    _, _, server = agent.run(both)
    assert [m.get("tool_call_id") for m in server.requests[-1]["messages"]][2:] == ["call-bash", "call-write_file"]


def test_it_stops_after_its_turns(agent: Mini) -> None:
    code, _, server = agent.run(*[call("bash", command="true")] * 9, MINI_MAX_TURNS="4")
    assert code == 0
    assert len(server.requests) == 4


def test_faults_of_the_way_are_retried_with_the_same_request(agent: Mini) -> None:
    code, _, server = agent.run(
        refusal(503, "no_cell"),
        lambda: None,
        (200, {"nonsense": True}),
        refusal(429, "slow"),
        call("bash", command="echo hi"),
        drops=2,
    )
    assert code == 0
    assert len(server.requests) == 6
    assert all(request == server.requests[0] for request in server.requests[:5])


@pytest.mark.parametrize(
    ("code", "message", "status"),
    [
        ("context_length_exceeded", "This model's maximum context length is 9 tokens.", 0),
        ("call_limit_exceeded", "You exceeded your current quota of requests.", 0),
        ("invalid_api_key", "Incorrect API key provided.", 3),
    ],
)
def test_a_refusal_ends_it_and_running_out_of_room_is_no_failure(
    agent: Mini, code: str, message: str, status: int
) -> None:
    exit_code, stderr, server = agent.run(call("bash", command="true"), refusal(400, code, message))
    assert exit_code == status
    assert message in stderr
    assert len(server.requests) == 2


def test_it_says_what_it_lacks(agent: Mini) -> None:
    code, stderr, _ = agent.run(OPENAI_BASE_URL="ftp://x")
    assert code == 2 and "http://" in stderr


def test_it_starts_in_well_under_100_ms_of_processor_time() -> None:
    line = f"import resource, runpy; runpy.run_path({str(SCRIPT)!r}); print(sum(resource.getrusage(0)[:2]))"
    runs = [
        float(subprocess.run([sys.executable, "-I", "-S", "-B", "-c", line], capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(runs) < 0.08
