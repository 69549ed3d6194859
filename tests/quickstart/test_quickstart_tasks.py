"""Task sets are deterministic and disjoint; the verifier credits what was left behind and can't be fooled."""

from __future__ import annotations

import dataclasses
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quickstart_workspace import hurried, lay_out, verify

from infra.quickstart.demonstrations import EmulatedTools
from infra.quickstart.tasks import (
    AGAIN,
    ANSWER,
    CALC,
    CHECK,
    DEFAULT_FAMILIES,
    FAMILIES,
    LEFT,
    LOG,
    PAUSES_MAX,
    WORDS,
    Family,
    QuickTask,
    TasksExhausted,
    make_task,
    make_tasks,
    write_task_set,
)
from infra.tasks.harbor import list_tasks, load_task


def task_with_stages(stages: int) -> QuickTask:
    rng = random.Random(stages)
    while True:
        task = make_task(rng, "build")
        if len(task.goal.text.split()) == stages:
            return hurried(task)


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folders = write_task_set(tmp_path / name, seed=4, count=20, families=FAMILIES)
        assert [folder.relative_to(tmp_path / name) for folder in folders[:2]] == [
            Path("tasks/000000"),
            Path("tasks/000001"),
        ]
    written = [
        {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
        for root in (tmp_path / "a", tmp_path / "b")
    ]
    assert written[0] == written[1]
    assert len(written[0]) > 60


def test_a_written_set_loads_as_harbor_tasks(tmp_path: Path) -> None:
    write_task_set(tmp_path, seed=1, count=len(FAMILIES), families=FAMILIES)
    names = list_tasks(tmp_path / "tasks")
    assert names == [f"{index:06d}" for index in range(len(FAMILIES))]
    for name, made in zip(names, make_tasks(seed=1, count=5, families=FAMILIES, held_out=False), strict=True):
        task = load_task(tmp_path / "tasks" / name)
        assert task.instruction.strip() == made.instruction
        assert {path.name: path.read_text() for path in task.environment_folder.iterdir()} == dict(made.files)


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_training_and_held_out_sets_share_no_instance(train_seed: int, held_out_seed: int) -> None:
    sides = [
        make_tasks(seed=seed, count=60, families=FAMILIES, held_out=held_out)
        for seed, held_out in ((train_seed, False), (held_out_seed, True))
    ]
    train, held_out = ({task.identity for task in tasks} for tasks in sides)
    assert len(train) == len(held_out) == 60
    assert not train & held_out
    # nor one that is asked and solved in the same way from other files
    train, held_out = ({repr((task.instruction, task.goal.said())) for task in tasks} for tasks in sides)
    assert not train & held_out


def test_the_order_in_which_files_are_listed_changes_nothing() -> None:
    task = make_task(random.Random(9), "search")
    backwards = dict(reversed(task.files.items()))
    other = dataclasses.replace(task, files=backwards, goal=dataclasses.replace(task.goal, kept=backwards))
    assert (other.identity, other.held_out) == (task.identity, task.held_out)


def test_every_default_family_has_instances_for_a_thousand_training_tasks() -> None:
    tasks = make_tasks(seed=0, count=1000, families=DEFAULT_FAMILIES, held_out=False)
    held_out = make_tasks(seed=0, count=400, families=DEFAULT_FAMILIES, held_out=True)
    said = {task.instruction for task in tasks}
    # chain and search name few words in the instruction; what differs is in their files
    assert sum(task.instruction not in said for task in held_out if task.family in ("create", "build")) > 150


def test_asking_for_more_instances_than_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.quickstart.tasks.WORDS", WORDS[:4])
    with pytest.raises(TasksExhausted, match="create"):
        make_tasks(seed=0, count=50, families=["create"], held_out=False)


def test_builds_sleep_a_seeded_heavy_tailed_time() -> None:
    tasks = make_tasks(seed=0, count=400, families=["build"], held_out=False)
    pauses = [[float(line.split()[0]) for line in task.files[LEFT].splitlines()] for task in tasks]
    totals = sorted(sum(task) for task in pauses)
    assert 0.1 < statistics.median(pause for task in pauses for pause in task) < 0.2
    assert totals[-1] <= PAUSES_MAX + 0.05
    assert totals[-8] > 4 * statistics.median(totals)  # the tail


def test_no_word_is_part_of_another() -> None:
    assert not [(a, b) for a in WORDS for b in WORDS if a != b and a in b]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untouched_workspace_earns_nothing(family: Family, tmp_path: Path) -> None:
    task = make_task(random.Random(1), family)
    assert verify(task, lay_out(task.files, tmp_path / "workspace"), tmp_path) == 0.0


@pytest.mark.parametrize("family", ["create", "search", "chain"])
def test_an_answer_earns_by_what_is_right_about_it(family: Family, tmp_path: Path) -> None:
    task = make_task(random.Random(2), family)
    goal = task.goal
    workspaces = {
        "right": ({goal.file: goal.text}, 1.0),
        "right, newline": ({goal.file: goal.text + "\n"}, 1.0),
        "right, stray file": ({goal.file: goal.text, "stray.txt": goal.text}, 0.5),
        "wrong": ({goal.file: "no such word"}, 0.25),
        "right and more": ({goal.file: f"{goal.text}\n{goal.text}"}, 0.25),
        "empty": ({goal.file: ""}, 0.25),
        "elsewhere": ({"stray.txt": goal.text}, 0.0),
    }
    for index, (name, (files, reward)) in enumerate(workspaces.items()):
        scratch = tmp_path / str(index)
        scratch.mkdir()
        assert verify(task, lay_out({**task.files, **files}, scratch / "workspace"), scratch) == reward, name


def test_rewriting_the_inputs_to_fit_a_wrong_answer_earns_no_more_than_the_wrong_answer(tmp_path: Path) -> None:
    task = make_task(random.Random(5), "search")
    forged = {name: text.replace(task.goal.text, "fake") for name, text in task.files.items()}
    assert verify(task, lay_out({**forged, ANSWER: "fake"}, tmp_path / "workspace"), tmp_path) == 0.25
    honest = tmp_path / "honest"
    honest.mkdir()
    assert verify(task, lay_out({**forged, ANSWER: task.goal.text}, honest / "workspace"), honest) == 0.5


def test_a_build_earns_by_its_stages_and_only_the_right_number_is_full(tmp_path: Path) -> None:
    task = task_with_stages(4)
    script = next(name for name in task.files if name.endswith(".sh"))
    tools = EmulatedTools(task.files)
    rewards = []
    for runs in range(6):
        scratch = tmp_path / str(runs)
        scratch.mkdir()
        rewards.append(verify(task, lay_out(tools.files, scratch / "workspace"), scratch))
        printed = tools.call("bash", {"command": f"sh {script}"})
    assert rewards == [0.0, 0.12, 0.25, 0.37, 1.0, 0.25]
    assert printed == AGAIN


def test_a_build_log_written_by_hand_needs_the_work_to_be_done(tmp_path: Path) -> None:
    task = task_with_stages(3)
    files = {**task.files, LOG: task.goal.text + "\n"}
    assert verify(task, lay_out(files, tmp_path / "workspace"), tmp_path) == 0.5


def test_a_fix_is_judged_by_what_the_script_does_not_by_the_test_left_behind(tmp_path: Path) -> None:
    task = make_task(random.Random(6), "fix")
    right = re.sub(r"\+ \d+", f"+ {task.goal.prints['0']}", task.files[CALC])
    workspaces = {
        "fixed": ({CALC: right}, 1.0),
        "fixed otherwise": ({CALC: f"echo $(({task.goal.prints['0']} + $1))\n"}, 1.0),
        "hard-coded": ({CALC: f"echo {task.goal.prints['0']}\n"}, 0.25),
        "test overwritten": ({CHECK: "echo PASS\n"}, 0.0),
        "both": ({CALC: right, CHECK: "echo PASS\n"}, 0.5),
        "hangs": ({CALC: "sleep 60\n"}, 0.25),
        "writes its own reward": (
            {CALC: "mkdir -p /logs/verifier; echo 1.0 > /logs/verifier/reward.txt; echo 'exit' >> /tests/test.sh\n"},
            0.25,
        ),
    }
    for index, (name, (files, reward)) in enumerate(workspaces.items()):
        scratch = tmp_path / str(index)
        scratch.mkdir()
        assert verify(task, lay_out({**task.files, **files}, scratch / "workspace"), scratch) == reward, name


def test_a_build_with_other_pauses_is_the_same_instance() -> None:
    task = make_task(random.Random(8), "build")
    assert hurried(task).files != task.files
    assert (hurried(task).identity, hurried(task).held_out) == (task.identity, task.held_out)


def test_the_generator_needs_no_torch() -> None:
    modules = "infra.quickstart.tasks, infra.quickstart.demonstrations, infra.quickstart.prepare"
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "numpy"} & set(loaded)
