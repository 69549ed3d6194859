"""The unmodified mini-swe-agent in a sandbox, through the relay, against scripted turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_chat_server import ScriptedChatServer, call

from infra.episodes.launch import EpisodeLaunch, launch_or_adopt, wait
from infra.harness.harness import Harness, HarnessUnavailable
from infra.harness.registry import harness_named
from infra.sandbox.bubblewrap import Bubblewrap

pytestmark = pytest.mark.stack

FINISH = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


async def test_the_real_agent_works_on_a_task_in_three_turns(
    mini_swe_agent: Harness,
    make_launch: Callable[..., EpisodeLaunch],
    chat: Callable[..., ScriptedChatServer],
    sandbox: Bubblewrap,
) -> None:
    server = chat(
        call("bash", command="pwd; id -u; echo $OPENAI_BASE_URL"),
        call("bash", command="echo fox > out.txt"),
        call("bash", command=FINISH),
    )
    running = await launch_or_adopt(make_launch(), mini_swe_agent, sandbox)
    end = await wait(running)
    assert (end.reason, end.exit_code) == ("exited", 0), running.log.read_text()
    assert (running.workspace / "out.txt").read_text() == "fox\n"
    assert len(server.requests) == 3
    assert set(server.keys) == {"Bearer key-1"}
    assert "Create `out.txt` with text `fox`." in str(server.requests[0]["messages"])
    assert json.loads(server.tool_outputs()[0])["output"] == "/workspace\n1000\nhttp://127.0.0.1:8080/v1\n"
    assert (running.folder / "home" / "trajectory.json").exists()


def test_what_is_not_installed_says_how_to_mend_it(folder: Path) -> None:
    with pytest.raises(HarnessUnavailable, match=r"python -m infra\.harness\.install mini-swe-agent --into"):
        harness_named("mini-swe-agent", folder).check()
    with pytest.raises(
        HarnessUnavailable, match="there are claude-code, codex, mini, mini-swe-agent, opencode, qwen-code"
    ):
        harness_named("max", folder)
    harness_named("mini").check()
