"""kill -9 of every kind of process in the middle of a step: the step completes, and nothing is trained twice."""

from __future__ import annotations

import json

import pytest
from local_stack import LocalStack
from redis import Redis

from infra.state import keys

pytestmark = pytest.mark.stack

EPISODES = 48
KILLS = {
    "workers": ["harness", "cell-0-worker", "control", "grade", "trajectory"],
    "servers": ["proxy", "temporal", "valkey"],
    "accelerators": ["cell-0-replica", "cell-1-engine"],
}


@pytest.mark.parametrize("kind", KILLS)
async def test_a_step_survives_the_death_of_its(stack: LocalStack, kind: str) -> None:
    run = f"kill-{kind}"
    stack.submit(stack.config(run, steps=1, group_size=EPISODES // 4))
    with Redis.from_url(stack.settings.redis) as redis:
        await stack.until("episodes run", lambda: int(redis.scard(keys.step_running(run, 0))) >= 8, 90)
    for process in KILLS[kind]:
        await stack.kill_and_see_restarted(process)
    (result,) = await stack.finished(run, 400)

    assert result["version"] == 1
    assert set(result["outcomes"]) == {"completed"}, stack.gyre("episodes", run)
    replay = stack.json("replay", run, "0")
    assert replay["difference"] < 1e-5
    assert replay["targets"] == result["trained_tokens"], "every trained token is in exactly one durable record"
    exits = [json.loads(file.read_text()) for file in (stack.settings.episodes / run).glob("*/*/*/exit.json")]
    assert len(exits) == EPISODES
    assert {exit_["generation"] for exit_ in exits} == {1}, "no harness was started a second time"
