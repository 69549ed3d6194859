"""Task folders: what is read, and what is refused with a word on how to mend it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.tasks.harbor import Task, TaskInvalid, list_tasks, load_task


def test_a_task_is_its_folder(make_task: Callable[..., Task], folder: Path) -> None:
    task = make_task(fox_txt="next=bear\n")
    assert task.instruction == "Create `out.txt` with text `fox`.\n"
    assert (task.agent.timeout_sec, task.verifier.timeout_sec, task.environment.memory_mb) == (60.0, 20.0, 512)
    assert (task.environment_folder / "fox.txt").read_text() == "next=bear\n"
    assert list_tasks(folder / "tasks") == [task.name]


def test_names_are_sorted_and_other_folders_are_no_tasks(folder: Path) -> None:
    for name in ("b", "a"):
        (folder / name).mkdir()
        (folder / name / "task.toml").touch()
    (folder / "c").mkdir()
    assert list_tasks(folder) == ["a", "b"]
    with pytest.raises(TaskInvalid, match="no such folder"):
        list_tasks(folder / "nowhere")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("", "schema_version is missing"),
        ('schema_version = "2.0"', "isn't known"),
        ("schema_version = ", "not TOML"),
        ('schema_version = "1.3"\n[agent]\ntimeout_sec = -1', r"agent\.timeout_sec"),
        ('schema_version = "1.3"\n[verifier]\ntimeout_sec = "long"', r"verifier\.timeout_sec"),
        ('schema_version = "1.3"\nagent = 3', r"agent: write it as a table"),
        ('schema_version = "1.3"\n[environment]\nnetwork_mode = "public"', "no network but the model gateway"),
        ('version = "1.0"\n[environment]\nallow_internet = true', "no network but the model gateway"),
        ('schema_version = "1.3"\n[environment]\ngpus = 1', r"environment\.gpus"),
        ('schema_version = "1.3"\n[[steps]]\nname = "one"', "steps: gyre cannot honour it"),
        ('schema_version = "1.3"\n[verifier]\nuser = "root"', r"verifier\.user: gyre cannot honour it"),
        ('schema_version = "1.3"\n[verifier.env]\nKEY = "${KEY}"', r"verifier\.env\.KEY"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(
    make_task: Callable[..., Task], settings: str, said: str
) -> None:
    folder = make_task().folder
    (folder / "task.toml").write_text(settings)
    with pytest.raises(TaskInvalid, match=said) as refusal:
        load_task(folder)
    assert str(folder / "task.toml") in str(refusal.value)


@pytest.mark.parametrize("file", ["task.toml", "instruction.md", "tests/test.sh"])
def test_a_missing_file_is_named(make_task: Callable[..., Task], file: str) -> None:
    folder = make_task().folder
    (folder / file).unlink()
    with pytest.raises(TaskInvalid, match=f"{file}: missing; write"):
        load_task(folder)


def test_empty_settings_of_newer_schemas_and_descriptions_pass(make_task: Callable[..., Task]) -> None:
    folder = make_task().folder
    (folder / "task.toml").write_text(
        'schema_version = "1.4"\nartifacts = []\n[metadata]\ntags = ["a"]\n[environment]\nmcp_servers = []\ncpus = 2\n'
    )
    assert load_task(folder).environment.cpus == 2


def test_services_beside_the_sandbox_are_refused(make_task: Callable[..., Task]) -> None:
    folder = make_task().folder
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}")
    with pytest.raises(TaskInvalid, match="docker-compose"):
        load_task(folder)
