"""`gyre why` reads what proxies, supervisors and cells have written to Redis, and says when it can't."""

from __future__ import annotations

import json

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.state import keys
from infra.state.redis import redis_client
from tests.processes import free_port
from trajectory.records import encode, make_record
from workers.why import episode_state
from workers.why.episode_state import EpisodeState, UnfinishedCall, read_episodes, read_shared

EPISODE, OTHER = "r/000000/000/00", "r/000000/000/01"
RECORDS = f"{EPISODE}~2"
KEY = keys.EpisodeKey(
    episode=EPISODE,
    generation=2,
    min_version=1,
    max_version=3,
    temperature=1.0,
    max_new_tokens=8,
    context_limit=64,
    max_calls=9,
)


async def write_episode(redis: Redis) -> None:
    """The second generation of an episode: a call has ended, one is held, one runs."""
    record = make_record(
        episode=EPISODE,
        seq=0,
        prev="",
        agent="root",
        parent=-1,
        kept=0,
        prompt_ids=[1],
        output_ids=[2],
        logprobs=[-1.0],
        versions=[0],
        temperature=1.0,
        finish_reason="stop",
        cells=["c0"],
        started_at=100.0,
        active_s=2.0,
        held_s=0.5,
    )
    unfinished = {"proxy": "p1", "cell": "c0", "rid": "p1.b", "since": 5.5}
    await redis.mset(
        {
            keys.records_of(EPISODE): RECORDS,
            keys.generation_of(EPISODE): 2,
            keys.held(RECORDS): "1.5",
            keys.lease(RECORDS): "2:77",
            keys.api_key_of(RECORDS): "secret",
            keys.key("secret"): KEY.model_dump_json(),
        }
    )
    await redis.rpush(keys.calls(RECORDS), encode(record))
    await redis.hset(keys.holding(RECORDS), "p1.a", "123.5")
    await redis.hset(keys.open_calls(RECORDS), "p1.b", json.dumps(unfinished))


async def test_an_unfinished_episode_is_read_with_its_generation_and_one_that_has_nothing_beside_it(
    redis: Redis,
) -> None:
    await write_episode(redis)
    states = await read_episodes(redis, [OTHER, EPISODE])
    assert states == {
        OTHER: EpisodeState(),
        EPISODE: EpisodeState(
            generation=2,
            calls=1,
            last_end=102.5,
            held_s=1.5,
            holding={"p1.a": 123.5},
            opened={"p1.b": UnfinishedCall(proxy="p1", cell="c0", since=5.5)},
            lease="2:77",
            versions=(1, 3),
        ),
    }
    assert await read_episodes(redis, []) == {}


async def test_of_many_episodes_no_record_is_read(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    await write_episode(redis)
    monkeypatch.setattr(episode_state, "LAST_RECORDS", 1)
    state = (await read_episodes(redis, [OTHER, EPISODE]))[EPISODE]
    assert (state.calls, state.last_end) == (1, None)


async def test_a_key_that_is_gone_leaves_no_versions(redis: Redis) -> None:
    await write_episode(redis)
    await redis.delete(keys.key("secret"))
    assert (await read_episodes(redis, [EPISODE]))[EPISODE].versions is None


async def test_proxies_whose_lease_has_run_out_do_not_count(redis: Redis) -> None:
    route = keys.Route(cell="c0", url="", incarnation="i", epoch=1, open=True, version=4)
    await redis.hset(keys.ROUTES, "c0", route.model_dump_json())
    await redis.sadd(keys.PROXIES, "dead", "lives")
    await redis.set(keys.proxy_lease("lives"), "1")
    shared = await read_shared(redis)
    assert (shared.routes, shared.proxies, shared.fault) == ({"c0": route}, {"lives"}, "")


async def test_a_redis_that_is_not_there_is_a_fault_and_no_error() -> None:
    async with redis_client(f"redis://127.0.0.1:{free_port()}/0") as away:
        shared = await read_shared(away)
        with pytest.raises(RedisError):
            await read_episodes(away, [EPISODE])
    assert "ConnectionError" in shared.fault and not shared.routes
