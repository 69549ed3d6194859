"""What the quickstart's tests share: real workspaces, the real verifier in its sandbox, tasks without the waiting."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from infra.quickstart.tasks import LEFT, QuickTask, write_task


def hurried(task: QuickTask) -> QuickTask:
    """The same task, its build not sleeping."""
    files = {name: re.sub(r"(?m)^\d+\.\d+ ", "0 ", text) if name == LEFT else text for name, text in task.files.items()}
    return dataclasses.replace(task, files=files)


def lay_out(files: Mapping[str, str], folder: Path) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def verify(task: QuickTask, workspace: Path, scratch: Path) -> float:
    """The reward that the task's own tests/test.sh writes, run where it will be run: /workspace, /tests, /logs."""
    write_task(task, scratch / "task")
    logs = scratch / "logs"
    logs.mkdir(exist_ok=True)
    roots = [part for name in ("bin", "lib", "lib64") for part in ("--symlink", f"usr/{name}", f"/{name}")]
    sandbox = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", *roots, "--dev", "/dev"]
    binds = ["--bind", str(workspace), "/workspace", "--ro-bind", str(scratch / "task" / "tests"), "/tests"]
    subprocess.run([*sandbox, *binds, "--bind", str(logs), "/logs", "/tests/test.sh"], check=True, timeout=20)
    return float((logs / "verifier" / "reward.txt").read_text())
