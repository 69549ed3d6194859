"""CPU quotas with real control groups and real processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.quota import Quota, QuotaUnavailable, left_over, places, set_quota
from infra.settings import Settings
from workers.stack.local import end_leftovers
from workers.stack.processes import ProcessSpec, quota_name
from workers.stack.supervisor import Stack

BURNS = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass'])\nwhile True: pass"
"""A process with a child; both would take a core each."""


@pytest.fixture
def quota() -> Iterator[Quota]:
    try:
        made = set_quota(f"gyre-test-{uuid.uuid4().hex[:8]}", 0.2)
    except QuotaUnavailable as unavailable:
        pytest.skip(str(unavailable))
    yield made
    for pid in made.processes():
        os.kill(pid, 9)
    assert made.remove()


def test_a_process_and_what_it_starts_share_the_quota(quota: Quota) -> None:
    process = subprocess.Popen(quota.command([sys.executable, "-c", BURNS]))
    deadline = time.monotonic() + 30
    while len(quota.processes()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert process.pid in quota.processes()
    before, began = quota.cpu_s(), time.monotonic()
    time.sleep(2)
    used = (quota.cpu_s() - before) / (time.monotonic() - began)
    process.kill()
    process.wait()
    assert 0.05 < used < 0.25, f"{used:.2f} of a core, 0.2 are allowed"


def test_where_no_group_may_be_made_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("infra.quota.places", lambda: iter([(tmp_path / "nowhere", 2)]))
    with pytest.raises(QuotaUnavailable, match=r"nowhere.*No such file"):
        set_quota("gyre-test", 0.5)


@pytest.mark.parametrize(
    ("mount", "own", "expected"),
    [
        ("32 31 0:29 / {top} rw - cgroup cgroup rw,cpu,cpuacct", "4:cpu,cpuacct:/a/b", [("a/b", 1), ("a", 1), ("", 1)]),
        ("32 31 0:29 /a {top} rw - cgroup cgroup rw,cpu", "4:cpu:/a/b", [("b", 1), ("", 1)]),
        ("32 31 0:29 /elsewhere {top} rw - cgroup cgroup rw,cpu", "4:cpu:/a/b", [("", 1)]),
        ("32 31 0:29 / {top} rw - cgroup2 cgroup2 rw", "0::/a", [("a", 2), ("", 2)]),
        ("32 31 0:29 / {top} rw - cgroup cgroup rw,memory", "4:memory:/a", []),
    ],
)
def test_a_group_is_made_near_this_process_or_further_up(
    tmp_path: Path, mount: str, own: str, expected: list[tuple[str, int]]
) -> None:
    top = tmp_path / "cgroup"
    for folder in ("a/b", "b"):
        (top / folder).mkdir(parents=True)
    (top / "cgroup.controllers").write_text("cpuset cpu memory")
    mounts, mine = tmp_path / "mountinfo", tmp_path / "own"
    mounts.write_text(mount.format(top=top) + "\n")
    mine.write_text(own + "\n")
    assert list(places(mounts, mine)) == [(top / folder if folder else top, version) for folder, version in expected]


async def test_a_cell_of_the_stack_is_held_once_all_is_ready_and_its_group_ends_with_the_stack(
    quota: Quota, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path, cells=1, cell_cpu=0.25)
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    stack = Stack(settings, [ProcessSpec("cell-0-engine", lambda: sleeps, cell="cell-0")])
    task = asyncio.create_task(stack.run())
    name = quota_name(settings, "cell-0")
    try:
        async with asyncio.timeout(30):
            while not (found := left_over(name)) or not found[0].processes() or not _held(found[0]):
                await asyncio.sleep(0.02)
    finally:
        stack.stop()
        await asyncio.wait_for(task, 30)
    assert not left_over(name)
    assert not end_leftovers(settings)


def _held(quota: Quota) -> bool:
    file = quota.folder / ("cpu.max" if quota.version == 2 else "cpu.cfs_quota_us")
    return file.read_text().split()[0] == "5000"
