"""`gyre why` on a real stack: what waits says for whom, why and until when; what has ended says why it ended so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from local_stack import LocalStack
from redis import Redis
from test_outcomes import write_slow_task, write_task

from infra.state import keys
from infra.temporal import connect
from workflows import names
from workflows.contracts.configuration import BudgetConfig, TaskSets
from workflows.contracts.results import PauseRequest
from workflows.run import Run

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def slow_and_broken(stack: LocalStack) -> TaskSets:
    tasks = stack.settings.root / "why"
    write_slow_task(tasks / "0-slow", "echo 0.5")
    write_task(
        tasks / "1-broken",
        instruction="Create `fox.txt` with text `red`.",
        files={},
        test="echo the verifier is broken >&2; exit 1",
    )
    return TaskSets(train=str(tasks))


def waits_of(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from answer["waits"]
    for part in answer["parts"]:
        yield from waits_of(part)


def why(stack: LocalStack, *what: str) -> list[dict[str, Any]]:
    """Every wait in the answers; each says who owns it, why, and what ends it."""
    answers = stack.json("why", *what)["answers"]
    waits = [wait for answer in answers for wait in waits_of(answer)]
    for wait in waits:
        assert wait["owner"] and wait["reason"] and wait["ends"], wait
    return waits


async def test_everything_that_waits_says_for_whom_and_why(stack: LocalStack, slow_and_broken: TaskSets) -> None:
    held, second = "why-held", "why-second"
    small = {"tasks": slow_and_broken, "tasks_per_step": 2, "group_size": 10, "steps": 1}
    stack.submit(stack.config(held, **small, budget=BudgetConfig(active_s=120, wall_s=900)))
    stack.submit(stack.config(second, **small, budget=BudgetConfig(active_s=4, wall_s=120)))
    client = await connect(stack.settings)  # not the command line: the first calls must be caught
    with Redis.from_url(stack.settings.redis) as redis:
        await stack.until("episodes run", lambda: int(redis.scard(keys.step_running(held, 0))) > 0, 90)
    pause = PauseRequest(request_id="why", hold=True)
    await client.get_workflow_handle_for(Run.run, names.run_id(held)).execute_update(Run.pause, pause)

    found: list[dict[str, Any]] = []

    def calls_are_held() -> bool:
        found[:] = [wait for wait in why(stack, f"{held}/0") if "in a call that is held" in wait["reason"]]
        return bool(found)

    await stack.until("a call is held", calls_are_held, 60)
    assert "every route is closed" in found[0]["reason"]
    assert "is idle (the run is paused and holds its calls)" in found[0]["reason"], "and what the cells do instead"
    assert found[0]["owner"].startswith("proxy ")
    assert found[0]["deadline"] is not None
    episode = found[0]["what"].removeprefix("episode ")
    (alone,) = [wait for wait in why(stack, episode) if wait["what"].startswith("episode")]
    assert alone["reason"] == found[0]["reason"]

    everything = {wait["what"]: wait for wait in why(stack)}
    paused = everything[f"run {held}"]
    assert paused["reason"].startswith("paused") and f"`gyre resume {held}`" in paused["ends"]
    assert paused["deadline"] is None
    leasing = everything[f"run {second}"]
    assert f"which run {held} has" in leasing["reason"]
    assert leasing["owner"] == "gyre/scheduler/local"
    assert f"`gyre resume {held}`" in everything["pool local"]["ends"]
    assert f"no deadline: a person (`gyre resume {held}`)" in stack.gyre("why")

    control = stack.pid("control")
    os.kill(control, signal.SIGSTOP)
    try:
        began = time.monotonic()
        waits = why(stack)
        assert time.monotonic() - began < 60, "a worker that doesn't answer is no reason to hang"
    finally:
        os.kill(control, signal.SIGCONT)
    (silent,) = [wait for wait in waits if wait["what"] == "every workflow"]
    assert "no worker has answered" in silent["reason"] and "is stopped by a signal" in silent["reason"]
    assert any(wait["reason"].startswith("in a call that is held") for wait in waits), "episodes need no worker to tell"

    stack.gyre("resume", held)
    await stack.finished(held)
    await stack.finished(second)
    assert stack.json("why")["decisions"], "the scheduler's last decisions are told"
    assert_ends_are_explained(stack, second)


def assert_ends_are_explained(stack: LocalStack, run: str) -> None:
    seals = {seal["outcome"]: seal for seal in stack.json("episodes", run)}
    late = stack.gyre("why", seals["timed_out"]["episode"])
    assert "budget spent after" in late and "of 4 s, held" in late
    assert "reward 0.500, by evaluator 0-slow@" in late
    assert "its harness has ended" in late
    broken = stack.json("why", seals["evaluator_failed"]["episode"])["answers"][0]
    told = "\n".join(broken["facts"])
    assert "the verifier is broken" in told
    assert "its harness before that: " in told
    assert "excluded, never zero: it is left out of its group's advantages, N" in told
    assert broken["data"]["excluded"] and broken["waits"] == []
    assert [moment["at"] for moment in broken["timeline"]] == sorted(moment["at"] for moment in broken["timeline"])
    assert "groups without gradient: no_variance=1, too_few=1" in stack.gyre("why", f"{run}/0")


async def test_what_does_not_exist_is_one_clear_line(stack: LocalStack) -> None:
    for what in ("no-such-run", "no-such-run/0", "no-such-run/0/0/0", "one/two"):
        assert stack.gyre("why", what, code=2) == ""
