"""The harness of `examples/plugin` works in a sandbox: one request, one script, and patience."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_chat_server import ScriptedChatServer, refusal

from infra.episodes.launch import EpisodeLaunch, launch_or_adopt, wait
from infra.harness.harness import Harness
from infra.sandbox.bubblewrap import Bubblewrap

pytestmark = pytest.mark.stack

SCRIPT = "I would do this:\n```sh\nprintf fox > out.txt\nenv > seen.txt\n```\n"


@pytest.fixture
def one_shot(monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "plugin")
    from gyre_example.harness import OneShot

    return OneShot(Path("/nowhere"))


async def test_the_policy_is_asked_once_and_its_script_is_run(
    one_shot: Harness,
    make_launch: Callable[..., EpisodeLaunch],
    chat: Callable[..., ScriptedChatServer],
    sandbox: Bubblewrap,
) -> None:
    turn: dict[str, Any] = {"role": "assistant", "content": SCRIPT}
    server = chat(refusal(503, "overloaded"), lambda: None, turn)
    one_shot.check()
    running = await launch_or_adopt(make_launch(), one_shot, sandbox)
    end = await wait(running)
    assert (end.reason, end.exit_code) == ("exited", 0), running.log.read_text()
    assert (running.workspace / "out.txt").read_text() == "fox"
    assert "key-1" not in (running.workspace / "seen.txt").read_text()
    assert set(server.keys) == {"Bearer key-1"}
    assert "Create `out.txt` with text `fox`." in server.requests[-1]["messages"][0]["content"]


async def test_a_request_that_is_refused_ends_it(
    one_shot: Harness,
    make_launch: Callable[..., EpisodeLaunch],
    chat: Callable[..., ScriptedChatServer],
    sandbox: Bubblewrap,
) -> None:
    chat(refusal(400, "context_length_exceeded", "too long"))
    running = await launch_or_adopt(make_launch(), one_shot, sandbox)
    end = await wait(running)
    assert (end.reason, end.exit_code) == ("exited", 3)
    assert "too long" in running.log.read_text()
