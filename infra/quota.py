"""CPU quotas: a named control group of the kernel that holds processes, and all that they start, to a share of cores.

Invariant: a process that is started by ``Quota.command`` is in the group before its program begins, so nothing that it
starts is ever outside. A quota is what they get at most and, by the group's weight, also what they get while others
want the cores. Both versions of control groups are spoken (v1: ``cpu.cfs_quota_us``, v2: ``cpu.max``); a group is made
below this process's own or, where that isn't allowed, further up.

It knows nothing of cells, engines or replicas.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil

PERIOD_US: Final = 20_000
"""Length of an accounting period: short beside what is measured, so that a held process looks slow and not jerky."""
JOIN: Final = 'echo 0 > "$1" && shift && exec "$@"'
"""For /bin/sh: put itself into the group, then become the program."""
REMOVE_S: Final = 10.0

Version = Literal[1, 2]


class QuotaUnavailable(RuntimeError):
    """This machine lets nobody set a CPU quota, or not this user. The message says what was tried."""


@dataclass(frozen=True)
class Quota:
    """A group that exists."""

    folder: Path
    cores: float
    version: Version = 1

    def hold(self) -> None:
        """Let its processes have ``cores``, no more."""
        for file, text in _settings(self.version, self.cores):
            (self.folder / file).write_text(text)

    def lift(self) -> None:
        """Let them have what they want, until ``hold``."""
        file, text = ("cpu.max", f"max {PERIOD_US}") if self.version == 2 else ("cpu.cfs_quota_us", "-1")
        (self.folder / file).write_text(text)

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` inside the group, under the same process id."""
        return ["/bin/sh", "-c", JOIN, "sh", str(self.folder / "cgroup.procs"), *command]

    def processes(self) -> list[int]:
        """Process ids in the group now; none when it is gone."""
        try:
            return [int(line) for line in (self.folder / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def cpu_s(self) -> float:
        """Processor seconds that its living processes have used (10 ms resolution)."""
        seconds = 0.0
        for pid in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                times = psutil.Process(pid).cpu_times()
                seconds += times.user + times.system
        return seconds

    def remove(self, deadline_s: float = REMOVE_S) -> bool:
        """Remove the group once its processes are gone. False when some are left after ``deadline_s`` seconds."""
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return True
            except OSError:  # busy: ended processes stay listed until they are reaped
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.05)
            else:
                return True


def set_quota(name: str, cores: float) -> Quota:
    """Make the group ``name``, or take the one that is there, and hold it to ``cores``. Raises QuotaUnavailable."""
    faults = []
    for parent, version in places():
        folder = parent / name
        try:
            if version == 2:
                _offer_cpu(parent)
            folder.mkdir(exist_ok=True)
            Quota(folder, cores, version).hold()
            os.close(os.open(folder / "cgroup.procs", os.O_WRONLY))
        except OSError as error:
            faults.append(f"{error.filename or folder}: {error.strerror}")
            if folder.is_dir():
                Quota(folder, cores).remove(0.0)
            continue
        return Quota(folder, cores, version)
    tried = "; ".join(faults) or "no control group with the cpu controller is mounted"
    raise QuotaUnavailable(f"cannot hold processes to a CPU quota ({tried}): run as root, or in a delegated group")


def left_over(prefix: str) -> list[Quota]:
    """Groups whose name begins with ``prefix``, wherever ``set_quota`` may have made them."""
    return [
        Quota(folder, 0.0, version)
        for parent, version in places()
        for folder in sorted(parent.glob(f"{prefix}*"))
        if folder.is_dir()
    ]


def places(
    mounts: Path = Path("/proc/self/mountinfo"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[Path, Version]]:
    """Folders in which a group could be made, the nearest to this process first."""
    own_groups = {}
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        own_groups[controllers] = path
    for line in _lines(mounts):
        before, _, after = line.partition(" - ")
        root, mounted = before.split()[3:5]
        kind, _, options = after.split()[:3]
        version: Version
        if kind == "cgroup" and "cpu" in options.split(","):
            version = 1
            own_group = next((path for names, path in own_groups.items() if "cpu" in names.split(",")), "/")
        elif kind == "cgroup2":
            version, own_group = 2, own_groups.get("", "/")
            if "cpu" not in " ".join(_lines(Path(mounted) / "cgroup.controllers")).split():
                continue
        else:
            continue
        top = Path(mounted)
        inside = os.path.relpath(own_group, root) if own_group.startswith(root) else "."
        folder = top / inside
        for place in [folder, *folder.parents]:
            if place.is_dir() and (place == top or top in place.parents):
                yield place, version


def _settings(version: Version, cores: float) -> list[tuple[str, str]]:
    quota = max(1000, round(cores * PERIOD_US))
    if version == 2:
        return [("cpu.max", f"{quota} {PERIOD_US}"), ("cpu.weight", "10000")]
    return [("cpu.cfs_period_us", str(PERIOD_US)), ("cpu.cfs_quota_us", str(quota)), ("cpu.shares", "65536")]


def _offer_cpu(parent: Path) -> None:
    """Let the groups below have a cpu controller."""
    control = parent / "cgroup.subtree_control"
    if "cpu" not in control.read_text().split():
        control.write_text("+cpu")


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
