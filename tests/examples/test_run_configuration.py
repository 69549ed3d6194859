"""`examples/run.toml` is a run: it has every key, says of each what it is, and passes what `gyre submit run` checks."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from infra.quickstart.tasks import write_task_set
from infra.settings import Settings
from workers.configuration import check, read_config
from workers.quickstart import quickstart_config
from workflows.contracts.configuration import RunConfig, TaskSets

EXAMPLE = Path(__file__).parents[2] / "examples" / "run.toml"


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, default) of a configuration; None where there is no default."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", None if field.is_required() else field.get_default()


def lines() -> dict[str, tuple[str, str, bool]]:
    """Dotted key -> its value and its comment as they are written, and whether the line is in use."""
    section, found = "", {}
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = f"{header[1]}."
        elif key := re.fullmatch(r"(# )?(\w+) = (.*?)\s+# (\S.*)", line):
            found[section + key[2]] = (key[3], key[4], not key[1])
        else:
            assert not line or line.startswith("#"), f"not explained: {line}"
    return found


def test_every_key_is_there_and_explained() -> None:
    assert sorted(lines()) == sorted(key for key, _ in keys_of(RunConfig))
    assert [key for key, (_, _, used) in lines().items() if not used] == ["loss.mismatch_p99"]


def test_what_is_said_to_be_the_default_is() -> None:
    defaults = dict(keys_of(RunConfig))
    for key, (value, comment, _) in lines().items():
        default = list(defaults[key]) if isinstance(defaults[key], tuple) else defaults[key]
        said = comment.startswith("(default)")
        assert said == (default is not None and tomllib.loads(f"it = {value}")["it"] == default), key
        if numbers := re.search(r"(\d+) by default", comment):
            assert int(numbers[1]) == default, key


def test_its_values_are_those_with_which_the_tiny_policy_learns() -> None:
    example = RunConfig.model_validate(tomllib.loads(EXAMPLE.read_text(encoding="utf-8")))
    quickstart = quickstart_config("example", Path("p"), TaskSets(train="t"), seed=0, steps=20, staleness=0)
    left_to_each = {"policy", "tasks", "task_order"}
    assert example.model_dump(exclude=left_to_each) == quickstart.model_dump(exclude=left_to_each)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Where the example finds its policy and its tasks, as `make train` leaves them."""
    cache = tmp_path / ".cache"
    for name in ("train-0-600", "heldout-200"):
        write_task_set(cache / "tasks" / name, seed=0, count=2, held_out=name.startswith("heldout"))
    policy = cache / "policy" / "default"
    policy.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (policy / name).touch()
    (tmp_path / "examples").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "examples")
    return tmp_path


def test_it_passes_what_submit_checks(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    check(read_config(checkout / "examples" / "run.toml"), Settings())


def test_the_folders_that_it_names_are_those_of_make_train() -> None:
    from workers import quickstart

    example = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))
    cache = Path("..") / quickstart.CACHE
    assert example["policy"] == str(cache / "policy" / "default")
    assert example["tasks"] == {
        "train": str(cache / "tasks" / f"train-0-{quickstart.TRAIN_TASKS}" / "tasks"),
        "heldout": str(cache / "tasks" / f"heldout-{quickstart.HELDOUT_TASKS}" / "tasks"),
    }
