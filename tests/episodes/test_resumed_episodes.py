"""Episodes that go on after a kill: in the same workspace by the harness's own resume, or from zero."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import pytest
from episode_parts import EpisodesValkey, ShellHarness, until
from redis.asyncio import Redis
from temporalio.client import Client

from activities.episodes import runner
from activities.episodes.runner import EpisodeRunner
from activities.services import Services
from infra.episodes.launch import (
    EpisodeLaunch,
    Running,
    SupervisorLost,
    dead_supervisor,
    launch_or_adopt,
    wait,
)
from infra.harness.harness import Session
from infra.sandbox.bubblewrap import Bubblewrap
from infra.settings import Settings
from infra.state import keys
from infra.tasks.harbor import Task
from workflows.contracts.configuration import BudgetConfig, SamplingConfig
from workflows.contracts.results import EpisodeExit, EpisodeInput, Outcome

pytestmark = pytest.mark.stack

WORKING = "echo kept > work; echo kept > $HOME/memory; touch started; sleep 300"
RESUMED = 'echo "$0" > session; cat $HOME/memory $HOME/.shell/settings >> work; echo $OPENAI_API_KEY > key'


async def kill(running: Running) -> None:
    assert running.supervisor is not None
    await until((running.workspace / "started").exists)
    os.kill(running.supervisor.pid, signal.SIGKILL)
    with pytest.raises(SupervisorLost):
        await wait(running)


async def test_a_resumed_harness_finds_its_files_and_a_new_key(
    make_launch: Callable[..., EpisodeLaunch], sandbox: Bubblewrap, valkey: EpisodesValkey
) -> None:
    harness = ShellHarness(WORKING, resume=RESUMED, settings="fresh settings\n")
    first = make_launch()
    await kill(await launch_or_adopt(first, harness, sandbox))
    assert dead_supervisor(first.folder).startswith("1:")
    second = make_launch(generation=2, resume=True, api_key="key-2")
    running = await launch_or_adopt(second, harness, sandbox)
    end = await wait(running)
    assert (end.reason, end.exit_code, end.generation) == ("exited", 0, 2)
    assert (running.workspace / "work").read_text() == "kept\nkept\nfresh settings\n"
    assert (running.workspace / "key").read_text() == "key-2\n"
    assert (running.workspace / "session").read_text().strip() == first.session().session_id


async def test_what_an_agent_left_in_its_home_cannot_lead_the_harness_files_out_of_it(
    make_launch: Callable[..., EpisodeLaunch], sandbox: Bubblewrap, folder: Path
) -> None:
    outside = folder / "outside"
    outside.mkdir()
    linking = f"rm -rf $HOME/.shell; ln -s {outside} $HOME/.shell; touch started; sleep 300"
    harness = ShellHarness(linking, resume="cat $HOME/.shell/settings > read", settings="mine\n")
    await kill(await launch_or_adopt(make_launch(), harness, sandbox))
    running = await launch_or_adopt(make_launch(generation=2, resume=True), harness, sandbox)
    assert (await wait(running)).exit_code == 0
    assert (running.workspace / "read").read_text() == "mine\n"
    assert list(outside.iterdir()) == []


async def test_what_an_episode_spent_before_a_kill_counts_when_it_goes_on(
    make_launch: Callable[..., EpisodeLaunch], sandbox: Bubblewrap, valkey: EpisodesValkey
) -> None:
    """2 s of life, 1 s of it held, and a budget of 2.5 s: the resumed harness has about 1.5 s left."""
    harness = ShellHarness("sleep 2; touch started; sleep 300", resume="sleep 300")
    running = await launch_or_adopt(make_launch(budget_s=2.5), harness, sandbox)
    valkey.client.set(keys.held("run/0/0/0"), 1.0)
    await kill(running)
    begun = time.monotonic()
    end = await wait(await launch_or_adopt(make_launch(budget_s=2.5, generation=2, resume=True), harness, sandbox))
    assert (end.reason, end.detail) == ("timed_out", "budget")
    assert 0.5 < time.monotonic() - begun < 3.2
    assert end.active_s == pytest.approx(2.5, abs=0.7) and end.held_s == pytest.approx(1.0)


async def test_where_nothing_was_left_there_is_nothing_to_resume(
    make_launch: Callable[..., EpisodeLaunch], sandbox: Bubblewrap
) -> None:
    with pytest.raises(SupervisorLost, match="holds nothing that shell could resume"):
        await launch_or_adopt(make_launch(generation=2, resume=True), ShellHarness("", resume="exit 0"), sandbox)


class Runs:
    """One episode through the runner of the harness worker, with its first supervisor killed."""

    def __init__(
        self, folder: Path, valkey: EpisodesValkey, redis: Redis, task: Task, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = Settings(home=folder / "home", redis_url=valkey.url)
        settings.proxy_socket.parent.mkdir(parents=True)
        self.runner = EpisodeRunner(Services(settings=settings, temporal=cast(Client, None), redis=redis))
        self.task_set, self.redis, self._monkeypatch = task.folder.parent, redis, monkeypatch
        self.keys: list[str] = []

    async def __call__(
        self, harness: ShellHarness, *, restarts: int = 1, answers: int = 1, **changes: object
    ) -> EpisodeExit:
        self._monkeypatch.setattr(runner, "harness_named", lambda name, folder: harness)
        values: dict[str, object] = {
            "run": "run",
            "step": 0,
            "group": 0,
            "index": 0,
            "task_set": str(self.task_set),
            "task": 0,
            "harness": "shell",
            "restarts": restarts,
            "min_version": 0,
            "max_version": 0,
            "sampling": SamplingConfig(),
            "budget": BudgetConfig(active_s=30, wall_s=30),
        }
        episode = EpisodeInput.model_validate(values | changes)
        self.workspace = self.runner.folder(episode) / "workspace"
        running = asyncio.create_task(self.runner.run(episode))
        await until((self.workspace / "started").exists)
        self.name = self.runner.name(episode)
        self.keys.append((await self.redis.get(keys.api_key_of(self.name))).decode())
        for _ in range(answers):
            await self.redis.rpush(keys.calls(self.name), b"a call's record")
        registration = (self.workspace.parent / "supervisor.json").read_text()
        os.kill(int(registration.partition('"pid": ')[2].partition(",")[0]), signal.SIGKILL)
        return await asyncio.wait_for(running, 20)


@pytest.fixture
async def runs(
    folder: Path, valkey: EpisodesValkey, make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Runs]:
    redis = Redis.from_url(valkey.url)
    yield Runs(folder, valkey, redis, make_task(), monkeypatch)
    await redis.aclose()


async def test_a_lost_episode_is_resumed_under_the_same_records(runs: Runs) -> None:
    end = await runs(ShellHarness(WORKING, resume=RESUMED, settings="s\n"))
    assert (end.outcome, end.records) == (Outcome.COMPLETED, runs.name)
    assert (runs.workspace / "work").read_text() == "kept\nkept\ns\n"
    assert int(await runs.redis.get(keys.generation_of(runs.name))) == 2, "the first generation's key is refused"
    assert not await runs.redis.exists(keys.key(runs.keys[0])), "and gone"
    assert (runs.workspace / "key").read_text().strip() != runs.keys[0]


class SecondStartEnds(ShellHarness):
    """Works until it is killed; started again from zero it ends at once."""

    starts = 0

    def command(self, instruction_path: str, session: Session) -> list[str]:
        self.starts += 1
        return ["/bin/sh", "-c", WORKING if self.starts == 1 else "ls > seen"]


@pytest.mark.parametrize(
    ("resume", "restart", "answers"),
    [("", "resume", 1), (RESUMED, "fresh", 1), (RESUMED, "resume", 0)],
    ids=["it has no resume", "fresh is wanted", "it got no answer yet"],
)
async def test_otherwise_it_starts_from_zero_under_records_of_its_own(
    runs: Runs, resume: str, restart: str, answers: int
) -> None:
    end = await runs(SecondStartEnds("", resume=resume), restart=restart, answers=answers)
    assert (end.outcome, end.records) == (Outcome.COMPLETED, f"{runs.name}~2")
    assert "work" not in (runs.workspace / "seen").read_text().split()


async def test_an_episode_that_is_lost_more_often_than_it_may_be_is_lost(runs: Runs) -> None:
    with pytest.raises(SupervisorLost):
        await runs(ShellHarness(WORKING, resume=RESUMED), restarts=0)
