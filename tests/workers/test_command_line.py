"""Bad input at the command line: one clear line that says what, where and how to mend it; exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import free_port

GYRE = str(Path(sys.executable).parent / "gyre")


def gyre(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"GYRE_HOME": str(folder / ".gyre"), "GYRE_PORT_BASE": str(min(free_port(), 60000)), **environment}
    return subprocess.run(
        [GYRE, *arguments],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def one_clear_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("gyre: "), done.stderr
    return lines[0]


CONFIG = """
name = "r1"
policy = "policy"
steps = 1
tasks_per_step = 2
[tasks]
train = "tasks"
"""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("lernrate = 1\n", "lernrate: unknown key"),
        ("[optimizer]\nlr = -1\n", "optimizer.lr"),
        ("[scheduler]\npolicy = 'greedy'\n", "scheduler.policy"),
        ("[tasks\n", "run.toml"),
    ],
)
def test_a_wrong_configuration_names_the_key(tmp_path: Path, change: str, says: str) -> None:
    (tmp_path / "run.toml").write_text(
        (change if "[" not in change else "") + CONFIG + (change if "[" in change else "")
    )
    assert says in one_clear_line(gyre("submit", "run", "run.toml", folder=tmp_path))


def test_a_missing_configuration_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.toml" in one_clear_line(gyre("submit", "run", "nowhere.toml", folder=tmp_path))


@pytest.mark.parametrize("command", [["watch", "r1"], ["pause", "r1"], ["status"], ["submit", "step", "--run", "r1"]])
def test_an_unreachable_server_says_how_to_start_one(tmp_path: Path, command: list[str]) -> None:
    assert "gyre up" in one_clear_line(gyre(*command, folder=tmp_path))


def test_up_without_a_policy_starts_nothing(tmp_path: Path) -> None:
    assert "gyre policy" in one_clear_line(gyre("up", folder=tmp_path))
    assert not (tmp_path / ".gyre" / "pids").exists()


def test_up_without_its_binaries_names_the_package(tmp_path: Path) -> None:
    assert "apt-get install" in one_clear_line(gyre("up", folder=tmp_path, PATH=str(tmp_path)))


def test_a_home_that_is_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    done = gyre("up", folder=tmp_path, GYRE_HOME=str(tmp_path / ("x" * 100)))
    assert "GYRE_HOME" in one_clear_line(done)


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    assert "cells" in one_clear_line(gyre("status", folder=tmp_path, GYRE_CELLS="none"))


@pytest.mark.parametrize("command", [["episodes", "r1"], ["show", "r1/000000/000/00"], ["replay", "r1", "0"]])
def test_an_unknown_run_is_named(tmp_path: Path, command: list[str]) -> None:
    assert "r1" in one_clear_line(gyre(*command, folder=tmp_path))


def test_down_with_nothing_running_is_no_fault(tmp_path: Path) -> None:
    assert gyre("down", folder=tmp_path).returncode == 0
