"""Peak memory of the local stack: proportional set sizes of every process, so that shared pages count once."""

from __future__ import annotations

import contextlib
import time

import psutil

from infra.settings import Settings
from workers.stack.local import read_state

EVERY_S = 10.0
"""Reading PSS walks every page table: seldom is enough."""


class PeakMemory:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._looked = 0.0
        self.peak_bytes = 0

    def look(self) -> None:
        if time.monotonic() - self._looked < EVERY_S:
            return
        self._looked = time.monotonic()
        state = read_state(self._settings)
        if state is None:
            return
        total = 0
        for process in state["processes"].values():
            with contextlib.suppress(psutil.Error):  # it has just been restarted
                total += sum(_pss(member) for member in process_tree(process["pid"]))
        self.peak_bytes = max(self.peak_bytes, total)


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and all that it has started. Raises psutil.Error."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0  # ended meanwhile
