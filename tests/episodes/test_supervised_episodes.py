"""Episodes under their supervisors: real processes, a real Valkey, and every way in which they are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from episode_parts import EpisodesValkey, ShellHarness, until
from scripted_chat_server import ScriptedChatServer, call

from infra.episodes import launch as launch_module
from infra.episodes.launch import (
    EpisodeLaunch,
    LaunchFailed,
    Superseded,
    SupervisorLost,
    launch_or_adopt,
    stop,
    wait,
)
from infra.episodes.processes import start_time
from infra.harness.registry import harness_named
from infra.sandbox.bubblewrap import Bubblewrap
from infra.state import keys
from infra.state.redis import redis_address
from infra.tasks.harbor import Task

pytestmark = pytest.mark.stack

EPISODE = "run/0/0/0"
MakeLaunch = Callable[..., EpisodeLaunch]

COUNTED = "echo started >> /workspace/starts; "
"""So that a second harness on the same workspace would be seen."""


def starts(launch: EpisodeLaunch) -> int:
    file = launch.folder / "workspace" / "starts"
    return len(file.read_text().splitlines()) if file.exists() else 0


async def test_an_episode_of_the_small_agent_runs_to_its_end(
    make_launch: MakeLaunch,
    make_task: Callable[..., Task],
    chat: Callable[..., ScriptedChatServer],
    sandbox: Bubblewrap,
    valkey: EpisodesValkey,
) -> None:
    server = chat(
        call("bash", command="cat fox.txt; ls -A; ls /gyre"),
        call("bash", command="cat absent"),
        call("write_file", path="out.txt", content="fox"),
        call("submit"),
    )
    launch = make_launch(task=make_task(fox_txt="next=bear\n"))
    running = await launch_or_adopt(launch, harness_named("mini"), sandbox)
    assert running.mode == "started"
    end = await wait(running)
    assert (end.reason, end.exit_code, end.generation) == ("exited", 0, 1)
    assert (running.workspace / "out.txt").read_text() == "fox"
    assert server.tool_outputs()[0] == "next=bear\nfox.txt\ninstruction.md\nmini.py"
    assert server.requests[0]["messages"][0]["content"] == "Create `out.txt` with text `fox`."
    assert server.keys == ["Bearer key-1"] * 4 and server.connections == 1
    assert 0 < end.cpu_s < 1 and end.active_s == pytest.approx(end.wall_s)
    assert running.log.read_text() == "" and (launch.folder / "supervisor.log").read_text() == ""
    assert not valkey.client.exists(keys.lease(EPISODE))
    assert sandbox.remains(running.workspace) == []


async def test_asking_again_for_a_finished_episode_finds_its_end(make_launch: MakeLaunch, sandbox: Bubblewrap) -> None:
    launch = make_launch()
    first = await wait(await launch_or_adopt(launch, ShellHarness(COUNTED + "exit 3"), sandbox))
    again = await launch_or_adopt(launch, ShellHarness(COUNTED), sandbox)
    assert again.mode == "finished"
    assert await wait(again) == first
    assert (first.exit_code, starts(launch)) == (3, 1)


async def test_two_concurrent_launches_make_one_harness(make_launch: MakeLaunch, sandbox: Bubblewrap) -> None:
    launch = make_launch()
    harness = ShellHarness(COUNTED + "sleep 0.5")
    running = await asyncio.gather(*(launch_or_adopt(launch, harness, sandbox) for _ in range(4)))
    assert sorted(one.mode for one in running) == ["adopted"] * 3 + ["started"]
    assert len({one.supervisor for one in running}) == 1
    ends = await asyncio.gather(*(wait(one) for one in running))
    assert {end.reason for end in ends} == {"exited"}
    assert starts(launch) == 1


WORKER = """
import asyncio, sys
from pathlib import Path
from episode_parts import ShellHarness
from infra.episodes.launch import EpisodeLaunch, launch_or_adopt, wait
from infra.sandbox.bubblewrap import Bubblewrap

async def main():
    launch = EpisodeLaunch.model_validate_json(Path(sys.argv[1]).read_text())
    running = await launch_or_adopt(launch, ShellHarness(sys.argv[2]), Bubblewrap())
    print(running.mode, running.supervisor.pid, flush=True)
    await wait(running)

asyncio.run(main())
"""


async def test_a_killed_worker_leaves_the_harness_running_to_be_adopted(
    make_launch: MakeLaunch, sandbox: Bubblewrap, folder: Path
) -> None:
    launch = make_launch()
    script = COUNTED + "while test ! -e go; do sleep 0.05; done; exit 4"
    (folder / "launch.json").write_text(launch.model_dump_json())
    worker = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", WORKER, str(folder / "launch.json"), script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(Path(__file__).parent)])},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert worker.stdout is not None
    mode, pid = (await worker.stdout.readline()).split()
    assert mode == b"started"
    await until(lambda: starts(launch) == 1)
    os.killpg(worker.pid, signal.SIGKILL)
    await worker.wait()

    adopted = await launch_or_adopt(launch, ShellHarness(script), sandbox)
    assert adopted.mode == "adopted" and adopted.supervisor is not None
    assert adopted.supervisor.pid == int(pid)
    beats: list[float] = []
    asyncio.get_running_loop().call_later(0.3, (adopted.workspace / "go").touch)
    end = await wait(adopted, lambda: beats.append(time.monotonic()), beat_s=0.05)
    assert (end.reason, end.exit_code, starts(launch)) == ("exited", 4, 1)
    assert len(beats) >= 3


async def test_a_killed_supervisor_leaves_no_harness_and_only_a_newer_generation_starts_again(
    make_launch: MakeLaunch, sandbox: Bubblewrap, valkey: EpisodesValkey
) -> None:
    launch = make_launch()
    running = await launch_or_adopt(launch, ShellHarness(COUNTED + "sleep 300 & sleep 300"), sandbox)
    assert running.supervisor is not None
    await until(lambda: starts(launch) == 1)
    os.kill(running.supervisor.pid, signal.SIGKILL)
    await until(lambda: not sandbox.remains(running.workspace), seconds=5)
    with pytest.raises(SupervisorLost, match=r"left no exit\.json"):
        await wait(running)
    assert valkey.client.get(keys.lease(EPISODE)) == f"1:{running.supervisor.pid}"

    start = time.monotonic()
    with pytest.raises(SupervisorLost, match="of generation 1"):
        await launch_or_adopt(launch, ShellHarness(COUNTED), sandbox)
    again = await launch_or_adopt(make_launch(generation=2), ShellHarness(COUNTED + "exit 0"), sandbox)
    assert again.mode == "started"
    assert (await wait(again)).reason == "exited"
    assert time.monotonic() - start < 5, "the dead supervisor's lease was waited for"
    assert starts(launch) == 1, "the workspace is fresh"


async def test_the_budget_is_spent_in_active_time(
    make_launch: MakeLaunch, sandbox: Bubblewrap, valkey: EpisodesValkey
) -> None:
    """2 s of finished holds and one that is open for most of the time aren't charged; 5 s of an earlier life neither
    add to them."""
    valkey.client.set(keys.held(EPISODE), 5.0)
    launch = make_launch(budget_s=0.8)
    running = await launch_or_adopt(launch, ShellHarness("sleep 60"), sandbox)
    await until(lambda: sandbox.remains(running.workspace))
    valkey.client.incrbyfloat(keys.held(EPISODE), 1.0)
    await asyncio.sleep(0.3)
    opened = time.time()
    valkey.client.hset(keys.holding(EPISODE), "call-1", opened)
    await asyncio.sleep(2.5)
    assert running.supervisor is not None and running.supervisor.alive()
    valkey.client.hdel(keys.holding(EPISODE), "call-1")
    valkey.client.incrbyfloat(keys.held(EPISODE), time.time() - opened)
    end = await wait(running)
    assert (end.reason, end.detail) == ("timed_out", "budget")
    assert end.held_s == pytest.approx(3.5, abs=0.4)
    assert 0.7 < end.active_s < 2.0
    assert end.wall_s == pytest.approx(end.held_s + end.active_s, abs=0.01)


async def test_the_wall_limit_holds_even_for_held_calls(
    make_launch: MakeLaunch, sandbox: Bubblewrap, valkey: EpisodesValkey
) -> None:
    valkey.client.hset(keys.holding(EPISODE), "call-1", time.time())
    launch = make_launch(budget_s=0.1, wall_limit_s=1.0)
    end = await wait(await launch_or_adopt(launch, ShellHarness("sleep 60"), sandbox))
    assert (end.reason, end.detail) == ("timed_out", "wall limit")
    assert end.active_s < 0.5


async def test_a_harness_is_asked_to_end_before_it_is_killed(make_launch: MakeLaunch, sandbox: Bubblewrap) -> None:
    polite = 'trap "echo bye > bye; exit 9" TERM; while :; do sleep 0.05; done'
    launch = make_launch(budget_s=0.5, grace_s=5)
    end = await wait(await launch_or_adopt(launch, ShellHarness(polite), sandbox))
    assert (end.reason, end.exit_code) == ("timed_out", 9)
    assert (launch.folder / "workspace" / "bye").exists()

    deaf = 'trap "" TERM; while :; do sleep 0.05; done'
    launch = make_launch(generation=2, budget_s=0.5, grace_s=0.3)
    end = await wait(await launch_or_adopt(launch, ShellHarness(deaf), sandbox))
    assert end.reason == "timed_out" and end.exit_code not in (0, None)
    assert end.wall_s < 4 and end.cpu_s > 0
    assert sandbox.remains(launch.folder / "workspace") == []


async def test_a_newer_generation_elsewhere_takes_the_lease_and_the_harness_is_killed_at_once(
    make_launch: MakeLaunch, sandbox: Bubblewrap, folder: Path
) -> None:
    old = make_launch(lease_ttl_s=0.6)
    deaf = ShellHarness('trap "" TERM; ' + COUNTED + "while :; do sleep 0.05; done")
    first = await launch_or_adopt(old, deaf, sandbox)
    await until(lambda: starts(old) == 1)
    new = make_launch(generation=2, folder=folder / "other-host", lease_ttl_s=0.6)
    second = await launch_or_adopt(new, ShellHarness("exit 0"), sandbox)
    lost, won = await asyncio.gather(wait(first), wait(second))
    assert (lost.reason, won.reason) == ("lease_lost", "exited")
    assert "2:" in lost.detail
    assert sandbox.remains(first.workspace) == []


async def test_a_lease_that_another_took_ends_the_harness(
    make_launch: MakeLaunch, sandbox: Bubblewrap, valkey: EpisodesValkey
) -> None:
    launch = make_launch(lease_ttl_s=0.6)
    running = await launch_or_adopt(launch, ShellHarness(COUNTED + "sleep 60"), sandbox)
    await until(lambda: starts(launch) == 1)
    valkey.client.set(keys.lease(EPISODE), "2:1")
    end = await wait(running)
    assert (end.reason, end.detail) == ("lease_lost", "the lease is held by 2:1")
    assert valkey.client.get(keys.lease(EPISODE)) == "2:1", "another's lease is not deleted"


async def test_a_generation_that_may_no_longer_speak_does_not_start(
    make_launch: MakeLaunch, sandbox: Bubblewrap, valkey: EpisodesValkey
) -> None:
    valkey.client.set(keys.generation_of(EPISODE), 2)
    end = await wait(await launch_or_adopt(make_launch(), ShellHarness(COUNTED), sandbox))
    assert (end.reason, end.exit_code) == ("lease_lost", None)


async def test_a_new_generation_on_the_same_host_replaces_the_old_one(
    make_launch: MakeLaunch, sandbox: Bubblewrap
) -> None:
    first = await launch_or_adopt(make_launch(), ShellHarness("echo old > old; sleep 60"), sandbox)
    await until((first.workspace / "old").exists)
    second = await launch_or_adopt(make_launch(generation=2), ShellHarness("ls; exit 5"), sandbox)
    assert second.mode == "started"
    assert (await wait(second)).exit_code == 5
    assert second.log.read_text() == "", "the workspace is fresh"
    with pytest.raises(Superseded):
        await launch_or_adopt(make_launch(), ShellHarness("exit 0"), sandbox)
    with pytest.raises(SupervisorLost):
        await wait(first)


async def test_redis_dying_for_longer_than_the_lease_ends_nothing(
    make_launch: MakeLaunch, sandbox: Bubblewrap, valkey: EpisodesValkey
) -> None:
    launch = make_launch(lease_ttl_s=0.6, budget_s=1.0)
    running = await launch_or_adopt(launch, ShellHarness(COUNTED + "while test ! -e go; do sleep 0.05; done"), sandbox)
    await until(lambda: starts(launch) == 1)
    valkey.client.set(keys.held(EPISODE), 60.0)
    valkey.kill()
    await asyncio.sleep(2.0)
    valkey.start()
    await until(lambda: valkey.client.get(keys.lease(EPISODE)) is not None)
    assert running.supervisor is not None and running.supervisor.alive()
    (running.workspace / "go").touch()
    assert (await wait(running)).reason == "exited"


@pytest.mark.parametrize("how", ["file", "signal", "stop"])
async def test_cancelling(make_launch: MakeLaunch, sandbox: Bubblewrap, how: str) -> None:
    running = await launch_or_adopt(make_launch(), ShellHarness("sleep 60"), sandbox)
    assert running.supervisor is not None
    await until(lambda: sandbox.remains(running.workspace))
    if how == "file":
        (running.folder / "cancel").touch()
    elif how == "signal":
        os.kill(running.supervisor.pid, signal.SIGTERM)
    else:
        await stop(running)
    assert (await wait(running)).reason == "cancelled"
    assert sandbox.remains(running.workspace) == []


async def test_stopping_a_supervisor_that_hangs_leaves_nothing(make_launch: MakeLaunch, sandbox: Bubblewrap) -> None:
    running = await launch_or_adopt(make_launch(), ShellHarness(COUNTED + "sleep 60"), sandbox)
    assert running.supervisor is not None
    await until(lambda: starts(make_launch()) == 1)
    os.kill(running.supervisor.pid, signal.SIGSTOP)
    assert await stop(running, patience_s=0.3) is None
    assert sandbox.remains(running.workspace) == []
    assert start_time(running.supervisor.pid) is None


async def test_a_cancelled_wait_leaves_the_episode_running(make_launch: MakeLaunch, sandbox: Bubblewrap) -> None:
    running = await launch_or_adopt(make_launch(), ShellHarness("sleep 0.7; exit 6"), sandbox)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await wait(running)
    assert (await wait(await launch_or_adopt(make_launch(), ShellHarness(""), sandbox))).exit_code == 6


async def test_a_sandbox_that_cannot_be_made_is_told_from_a_harness_that_fails(
    make_launch: MakeLaunch, sandbox: Bubblewrap, folder: Path
) -> None:
    launch = make_launch(proxy_socket=folder / "no-such-folder" / "proxy.sock")
    end = await wait(await launch_or_adopt(launch, ShellHarness("exit 1"), sandbox))
    assert end.reason == "failed_to_start"
    assert "no-such-folder" in end.detail


async def test_a_lock_that_nobody_explains_is_an_error(
    make_launch: MakeLaunch, sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "LAUNCH_DEADLINE_S", 0.3)
    launch = make_launch()
    launch.folder.mkdir()
    lock = launch_module._try_lock(launch.folder)
    assert lock is not None
    with pytest.raises(LaunchFailed, match="lock stays held"):
        await launch_or_adopt(launch, ShellHarness(""), sandbox)
    os.close(lock)


async def test_what_the_supervisor_is_told_is_for_its_owners_eyes(make_launch: MakeLaunch, sandbox: Bubblewrap) -> None:
    launch = make_launch(api_key="secret-key")
    running = await launch_or_adopt(launch, ShellHarness("sleep 0.5"), sandbox)
    await until(lambda: sandbox.remains(running.workspace))
    assert (launch.folder / "spec.json").stat().st_mode & 0o077 == 0
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in sandbox.remains(running.workspace)]
    assert not any("secret-key" in line for line in lines)
    assert "secret-key" not in repr(launch)
    assert json.loads((launch.folder / "spec.json").read_text())["environment"]["OPENAI_API_KEY"] == "secret-key"
    await wait(running)


def test_redis_urls_are_taken_apart() -> None:
    assert redis_address("redis://h:1/2") == {
        "host": "h", "port": 1, "db": 2, "tls": False, "username": "", "password": ""
    }  # fmt: skip
    parts = redis_address("rediss://me:p%40ss@h")
    assert (parts["username"], parts["password"], parts["tls"], parts["port"]) == ("me", "p@ss", True, 6379)
    assert redis_address("unix:///tmp/s.sock")["path"] == "/tmp/s.sock"
    with pytest.raises(ValueError, match="Redis URL"):
        redis_address("http://h")
