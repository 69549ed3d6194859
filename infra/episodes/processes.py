"""Processes without threads: started by posix_spawn, awaited through a pidfd, named by pid and start time.

A pid alone names a process only until it is used again; with its start time it names one for good. That is in clock
ticks since boot, as the supervisor reads and writes it, which has the standard library only: psutil's is in seconds of
a wall clock that may be set. It knows nothing of what the processes do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.episodes.supervisor import start_time

__all__ = ["ended", "reap", "signal_named", "spawn", "start_time"]


def spawn(
    argv: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    detached: bool = False,
    keep_fd: int | None = None,
) -> int:
    """Start ``argv`` with exactly ``environment``, output and errors to the new file ``log``; returns the pid.

    ``detached`` gives it a session of its own, otherwise a process group. ``keep_fd`` is inherited under its own
    number. Raises OSError when the program can't be started.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
    actions: list[tuple[int, int] | tuple[int, int, int] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    if keep_fd is not None:
        actions.append((os.POSIX_SPAWN_DUP2, keep_fd, keep_fd))
    group = {"setsid": True} if detached else {"setpgroup": 0}
    return os.posix_spawn(
        argv[0],
        list(argv),
        dict(environment),
        file_actions=actions,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM],
        **group,
    )


def reap(pid: int) -> int | None:
    """Wait status of a child that has ended; None when it hasn't, or is no child of this process."""
    with contextlib.suppress(ChildProcessError):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
    return None


async def ended(pid: int, timeout_s: float) -> bool:
    """Wait until the process has ended (it is not reaped); False when the time is up before."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(descriptor, over.set)
    try:
        async with asyncio.timeout(timeout_s):
            await over.wait()
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def signal_named(pid: int, start: int, number: int) -> bool:
    """Signal the process that started at ``start``, never another that has its pid now; False when it has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if start_time(pid) != start:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True
