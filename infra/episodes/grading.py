"""Grades what a harness left: the task's verifier in a sandbox of its own, once the harness is gone.

Invariant: a reward is what the verifier wrote, in [0, 1]; whatever else happens is EvaluatorFailed, never a zero.
The verifier works on a copy, so the preserved workspace can be graded again, and its tests are mounted only now.
Files that it leaves are an agent's as much as its own: they are read without following links.

It knows the verifier's contract (Harbor's); it does not know outcomes or advantages.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from infra.episodes.processes import ended, reap, spawn
from infra.files import remove_tree, tail
from infra.sandbox.spec import BASE_ENVIRONMENT, Bind, Sandbox, SandboxLimits, SandboxSpec
from infra.tasks.harbor import Task

MEMORY_MB: Final = 4096
COPY_DEADLINE_S: Final = 600.0
KILL_DEADLINE_S: Final = 10.0
REWARD_BYTES: Final = 65536


class EvaluatorFailed(RuntimeError):
    """The verifier gave no usable reward: the episode is excluded, and can be graded again. ``log`` is its tail."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(f"{reason}; its output ends: {log}" if log else reason)
        self.reason, self.log = reason, log


class Graded(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    reward: float = Field(ge=0, le=1)
    source: Literal["reward.txt", "reward.json"]
    seconds: float
    """Wall time of the verifier."""
    details: dict[str, float] = {}
    """Every number of reward.json."""


def evaluator_of(task: Task) -> str:
    """``NAME@sha256:HEX`` of all that decides a verdict besides the workspace: the tests and their settings."""
    digest = hashlib.sha256(json.dumps([task.verifier.model_dump(), task.environment.model_dump()]).encode())
    for file in sorted(task.tests_folder.rglob("*")):
        mode, name = file.lstat().st_mode, file.relative_to(task.tests_folder).as_posix()
        if stat.S_ISLNK(mode):
            content = os.readlink(file).encode()
        else:
            content = hashlib.sha256(file.read_bytes()).digest() if stat.S_ISREG(mode) else b""
        digest.update(json.dumps([name, stat.S_IFMT(mode), mode & 0o111, content.hex()]).encode())
    return f"{task.name}@sha256:{digest.hexdigest()}"


async def grade(task: Task, workspace: Path, logs_dir: Path, timeout_s: float, sandbox: Sandbox) -> Graded:
    """Run ``task``'s verifier on a copy of ``workspace``. Raises EvaluatorFailed.

    ``logs_dir`` is emptied; ``verifier.log`` (output) and ``verifier/`` (mounted as /logs/verifier) stay there.
    The sandbox dies with the thread that runs this event loop.
    """
    logs = logs_dir.absolute()
    await asyncio.to_thread(remove_tree, logs)
    (logs / "verifier").mkdir(parents=True)
    log, copy = logs / "verifier.log", logs / "workspace"
    shell = "/bin/sh" if _first_line(task.tests_folder / "test.sh") == "#!/bin/sh" else "/bin/bash"
    spec = SandboxSpec(
        argv=(shell, "/tests/test.sh"),
        workspace=copy,
        binds=(
            Bind(source=task.tests_folder, target="/tests"),
            Bind(source=logs / "verifier", target="/logs/verifier", writable=True),
        ),
        limits=SandboxLimits(address_space_mb=max(task.environment.memory_mb or 0, MEMORY_MB)),
    )
    environment = {**BASE_ENVIRONMENT, **task.environment.env, **task.verifier.env}
    killed = True
    try:
        # cp keeps what shutil refuses: sockets, FIFOs and hard links that an agent may have made
        copied = await _run(["/bin/cp", "-a", "--", str(workspace.absolute()), str(copy)], {}, log, COPY_DEADLINE_S)
        if copied != 0:
            raise EvaluatorFailed(f"the workspace {workspace} cannot be copied", tail(log))
        start = time.monotonic()
        exit_code = await _run(sandbox.command(spec), environment, log, timeout_s)
        seconds = time.monotonic() - start
        killed = exit_code is None
        if exit_code is None:
            raise EvaluatorFailed(f"the verifier did not end within {timeout_s:g} s", tail(log))
        reward, source, details = _reward(logs / "verifier", exit_code, tail(log))
        return Graded(reward=reward, source=source, seconds=seconds, details=details)
    finally:
        if killed:
            await asyncio.to_thread(sandbox.clear, copy)
        await asyncio.to_thread(remove_tree, copy)


async def _run(argv: list[str], environment: dict[str, str], log: Path, timeout_s: float) -> int | None:
    """Exit code of a process, None when it was killed for taking too long. Never leaves it running."""
    pid = spawn(argv, environment, log)
    status: int | None = None
    try:
        if not await ended(pid, timeout_s):
            return None
        status = reap(pid)
    finally:
        if status is None:
            os.kill(pid, signal.SIGKILL)
            await ended(pid, KILL_DEADLINE_S)
            reap(pid)
    return os.waitstatus_to_exitcode(status) if status is not None else None


def _reward(
    folder: Path, exit_code: int, log: str
) -> tuple[float, Literal["reward.txt", "reward.json"], dict[str, float]]:
    text = _text(folder / "reward.txt", log)
    if text is not None:
        try:
            return _in_range(float(text.strip()), "reward.txt", log), "reward.txt", {}
        except ValueError:
            raise EvaluatorFailed(f"reward.txt holds {text[:80]!r}, not one number", log) from None
    text = _text(folder / "reward.json", log)
    if text is None:
        raise EvaluatorFailed(f"the verifier ended with exit code {exit_code} and wrote no reward", log)
    try:
        details = _numbers(json.loads(text))
    except (ValueError, OverflowError, RecursionError) as error:
        raise EvaluatorFailed(f"reward.json: {error}", log) from error
    reward = details["reward"] if "reward" in details else sum(details.values()) / len(details)
    return _in_range(reward, "reward.json", log), "reward.json", details


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or not value:
        raise ValueError(f"write an object of name: number, not {str(value)[:80]}")
    for name, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"{name!r} is {str(number)[:80]}, not a number")
    return {name: float(number) for name, number in value.items()}


def _in_range(reward: float, file: str, log: str) -> float:
    if not 0.0 <= reward <= 1.0:  # also false for NaN
        raise EvaluatorFailed(f"{file}: the reward {reward:g} is not in [0, 1]", log)
    return reward


def _text(file: Path, log: str) -> str | None:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EvaluatorFailed(f"{file.name} cannot be read: {error.strerror}", log) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise EvaluatorFailed(f"{file.name} is not a file", log)
    with open(descriptor, "rb") as stream:
        data = stream.read(REWARD_BYTES + 1)
    if len(data) > REWARD_BYTES:
        raise EvaluatorFailed(f"{file.name} is larger than {REWARD_BYTES} bytes", log)
    return data.decode("utf-8", "replace")


def _first_line(file: Path) -> str:
    with file.open(encoding="utf-8", errors="replace") as stream:
        return stream.readline().strip()
