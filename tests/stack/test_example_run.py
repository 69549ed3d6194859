"""`examples/run.toml` is submitted to a real stack, as it stands in the repository."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from local_stack import LocalStack

pytestmark = pytest.mark.stack

EXAMPLE = Path(__file__).parents[2] / "examples" / "run.toml"


async def test_the_example_is_submitted_and_its_first_step_opens(stack: LocalStack, tmp_path: Path) -> None:
    cache = tmp_path / ".cache"
    for name, target in (
        ("policy/default", stack.settings.policy),
        ("tasks/train-0-600/tasks", Path(stack.tasks.train)),
        ("tasks/heldout-200/tasks", Path(stack.tasks.heldout)),
    ):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(target)
    (tmp_path / "examples").mkdir()
    stack.gyre("submit", "run", str(shutil.copy(EXAMPLE, tmp_path / "examples")))
    await stack.until("its first step is open", lambda: bool(stack.json("watch", "example")["open_steps"]), 60)
    stack.gyre("cancel", "example")
    await stack.until("it has ended", lambda: stack.json("watch", "example")["status"] == "CANCELED", 60)
    await stack.until("the pool is free", lambda: stack.json("status")["leased_to"] == "", 60)
