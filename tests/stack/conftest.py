"""One stack for all end-to-end tests of a session: starting two engines takes most of a minute."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_stack import LocalStack

from infra.quickstart.prepare import prepare_policy
from infra.quickstart.tasks import write_task_set
from tests.processes import free_settings
from workflows.contracts.configuration import TaskSets

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny_policy() -> Path:
    """The quickstart's policy, from its cache."""
    return prepare_policy(ROOT / ".cache" / "policy", seed=0).absolute()


@pytest.fixture(scope="session")
def stack(tiny_policy: Path) -> Iterator[LocalStack]:
    home = Path(tempfile.mkdtemp(prefix="gyre-"))  # short: unix sockets lie in it
    write_task_set(home / "train", seed=0, count=40)
    write_task_set(home / "heldout", seed=0, count=8, held_out=True)
    tasks = TaskSets(train=str(home / "train" / "tasks"), heldout=str(home / "heldout" / "tasks"))
    harnesses = ROOT / ".gyre-harness"
    local = LocalStack(free_settings(home, policy=tiny_policy, harnesses=harnesses), tasks)
    local.gyre("up")
    try:
        yield local
    finally:
        local.gyre("down")
        shutil.rmtree(home, ignore_errors=True)
