"""kill -9 of every kind of process in the middle of a step: the step completes, and nothing is trained twice."""

from __future__ import annotations

import json

import pytest
from local_stack import LocalStack
from redis import Redis

from infra import keys
from workflows.configuration import RunConfig

pytestmark = pytest.mark.stack


def slow_config(stack: LocalStack, name: str) -> RunConfig:
    """One step of 32 episodes, with enough to do for a process to die and come back in its middle."""
    return stack.config(name, steps=1, group_size=8)


@pytest.mark.parametrize(
    "process", ["harness", "cell-0-worker", "cell-0-replica", "cell-1-engine", "control", "proxy", "temporal", "valkey"]
)
async def test_a_step_survives_the_death_of(stack: LocalStack, process: str) -> None:
    run = f"kill-{process}"
    stack.submit(slow_config(stack, run))
    with Redis.from_url(stack.settings.redis) as redis:
        await stack.until("episodes run", lambda: int(redis.scard(keys.step_running(run, 0))) >= 8, 90)
    before = stack.pid(process)
    stack.kill(process)
    await stack.until(f"{process} is restarted", lambda: stack.pid(process) != before, 30)
    (result,) = await stack.finished(run, 400)

    assert result["version"] == 1
    assert set(result["outcomes"]) == {"completed"}, stack.gyre("episodes", run)
    replay = stack.json("replay", run, "0")
    assert replay["difference"] < 1e-5
    assert replay["targets"] == result["trained_tokens"], "every trained token is in exactly one durable record"
    exits = [json.loads(file.read_text()) for file in (stack.settings.episodes / run).glob("*/*/*/exit.json")]
    assert len(exits) == 32
    assert {exit_["generation"] for exit_ in exits} == {1}, "no harness was started a second time"
