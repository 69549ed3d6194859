"""A small installed package: a module, and metadata with entry points, in a folder where Python looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trajectory.config import LOSS_NAMES
from trajectory.loss import loss_named
from workflows.contracts.configuration import POLICY_NAMES
from workflows.scheduling.policies import policy_named


def put_package(folder: Path, name: str, group: str, code: str, **entries: str) -> None:
    """``entries``: the name of each entry point in ``group``, and what it is called in the module."""
    (folder / f"{name}.py").write_text(code)
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    lines = [f"{entry} = {name}:{thing}" for entry, thing in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


@contextmanager
def packages_read_anew() -> Iterator[None]:
    """Entry points are read once a process: here they are read when the block begins, and again after it."""

    def forget() -> None:
        for names in (LOSS_NAMES, POLICY_NAMES):
            names.__dict__.pop("plugins", None)
        loss_named.cache_clear()
        policy_named.cache_clear()

    forget()
    yield
    forget()
