"""The emulated tools answer what the real ones answer, byte for byte, and grade as the real verifier grades."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from quickstart_workspace import hurried, lay_out, verify

from infra.harness.mini import TOOLS as MINI_TOOLS
from infra.harness.mini import call_tool
from infra.quickstart.demonstrations import TOOLS, EmulatedTools, NotEmulated, demonstrate, grade
from infra.quickstart.tasks import FAMILIES, Family, make_task


@pytest.mark.parametrize("family", FAMILIES)
def test_every_output_of_a_demonstration_is_what_the_real_tools_print(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"outputs/{family}")
    for episode in range(12):
        task = hurried(make_task(rng, family))
        workspace = lay_out(task.files, tmp_path / str(episode))
        monkeypatch.chdir(workspace)
        emulated = EmulatedTools(task.files)
        demo = demonstrate(rng, task, mistake_rate=0.5)
        for turn, answer in zip(demo.messages[1::2], demo.messages[2::2], strict=False):
            (call,) = turn.tool_calls
            assert call_tool(call.name, call.arguments, 10.0) == answer.content
            emulated.call(call.name, json.loads(call.arguments))
            assert {path.name: path.read_text() for path in workspace.iterdir()} == emulated.files


@pytest.mark.parametrize("family", FAMILIES)
def test_the_emulated_grade_is_the_verifiers(family: Family, tmp_path: Path) -> None:
    rng = random.Random(f"grades/{family}")
    seen = set()
    for episode in range(16):
        scratch = tmp_path / str(episode)
        scratch.mkdir()
        task = hurried(make_task(rng, family))
        tools = EmulatedTools(task.files)
        demo = demonstrate(rng, task, mistake_rate=0.4)
        for turn in demo.messages[1:-1:2]:
            tools.call(turn.tool_calls[0].name, json.loads(turn.tool_calls[0].arguments))
        workspace = lay_out(tools.files, scratch / "workspace")
        assert verify(task, workspace, scratch) == demo.reward == grade(task, tools.files)
        seen.add(demo.reward)
    assert {0.0, 1.0} <= seen


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("edit_file", {"path": "none.txt", "old": "a", "new": "b"}),
        ("edit_file", {"path": "note.txt", "old": "absent", "new": "b"}),
        ("edit_file", {"path": "note.txt", "old": "x", "new": "y"}),
        ("edit_file", {"path": "note.txt"}),
        ("write_file", {"path": "note.txt"}),
        ("bash", {}),
        ("bash", {"command": "cat note.txt"}),
        ("bash", {"command": "cat gone.txt"}),
        ("bash", {"command": "grep xx *"}),
        ("bash", {"command": "ls"}),
    ],
)
def test_errors_and_long_outputs_are_the_harness_own(
    tool: str, arguments: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"note.txt": "x" * 200 + "\n\n", "other.txt": "xx\nyy\n"}
    monkeypatch.chdir(lay_out(files, tmp_path / "workspace"))
    assert EmulatedTools(files).call(tool, arguments) == call_tool(tool, json.dumps(arguments), 10.0)


def test_an_empty_workspace_lists_and_greps_like_the_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("ls", "grep fox *"):
        assert EmulatedTools({}).call("bash", {"command": command}) == call_tool(
            "bash", json.dumps({"command": command}), 10.0
        )


def test_a_command_that_is_not_known_is_refused_instead_of_guessed() -> None:
    with pytest.raises(NotEmulated):
        EmulatedTools({}).call("bash", {"command": "cat a; rm b"})


def test_the_demonstrator_has_the_tools_of_the_harness_in_its_order() -> None:
    assert [tool.name for tool in TOOLS] == [tool["function"]["name"] for tool in MINI_TOOLS]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_expert_without_mistakes_always_passes(family: Family) -> None:
    rng = random.Random(3)
    turns = []
    for _ in range(200):
        demo = demonstrate(rng, make_task(rng, family), mistake_rate=0.0)
        assert demo.reward == 1.0
        turns.append(len(demo.messages) // 2)
    assert max(turns) <= 11
    assert sum(turns) / len(turns) <= 5.5
