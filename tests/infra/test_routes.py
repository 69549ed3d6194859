"""The route table under overtaken orders, silent proxies and dead ones, on a real Valkey."""

from __future__ import annotations

import time

import pytest
from redis.asyncio import Redis

from infra.state import keys
from infra.state.keys import Drained, Route
from infra.state.routes import DrainTimeout, RouteOvertaken, get_route, set_route, wait_acknowledged


def route(epoch: int, *, open: bool, version: int = 0, drain_s: float = 0.0) -> Route:
    url = "http://127.0.0.1:1"
    return Route(cell="cell-0", url=url, incarnation="i", epoch=epoch, open=open, version=version, drain_s=drain_s)


async def test_an_overtaken_order_cannot_reopen_a_closed_route(redis: Redis) -> None:
    await set_route(redis, route(1, open=True))
    await set_route(redis, route(3, open=False))
    with pytest.raises(RouteOvertaken, match="epoch 2 was overtaken by 3"):
        await set_route(redis, route(2, open=True))
    found = await get_route(redis, "cell-0")
    assert found is not None and (found.open, found.epoch) == (False, 3)


async def test_draining_waits_for_live_proxies_and_not_for_dead_ones(redis: Redis) -> None:
    closed = route(3, open=False)
    await redis.sadd(keys.PROXIES, "alive", "dead")
    await redis.set(keys.proxy_lease("alive"), "1", px=60_000)
    with pytest.raises(DrainTimeout, match="alive"):
        await wait_acknowledged(redis, closed, deadline_s=0.2)
    await redis.hset(keys.route_acks("cell-0"), "alive", "i:2")
    with pytest.raises(DrainTimeout):
        await wait_acknowledged(redis, closed, deadline_s=0.2)
    await redis.hset(keys.route_acks("cell-0"), "alive", "i:3")
    done = await wait_acknowledged(redis, closed, deadline_s=5)
    assert (done.acknowledged, done.expired) == (1, 1)


async def test_the_time_that_calls_get_is_part_of_the_deadline_and_a_newer_epoch_ends_the_wait(redis: Redis) -> None:
    closed = route(3, open=False, drain_s=0.4)
    await set_route(redis, closed)
    await redis.sadd(keys.PROXIES, "slow", "quick")
    for proxy in ("slow", "quick"):
        await redis.set(keys.proxy_lease(proxy), "1", px=60_000)
    await redis.hset(keys.route_acks("cell-0"), mapping={"quick": "i:3", "slow": "i:2"})
    await redis.hset(keys.route_drains("cell-0"), "quick", Drained(ended=2, moved=1).model_dump_json())
    await redis.hset(keys.route_drains("cell-0"), "slow", Drained(ended=7).model_dump_json())  # of another epoch
    started = time.monotonic()
    with pytest.raises(DrainTimeout, match=r"^slow still"):
        await wait_acknowledged(redis, closed, deadline_s=0.1)
    assert time.monotonic() - started >= 0.5
    await redis.delete(keys.proxy_lease("slow"))
    done = await wait_acknowledged(redis, closed, deadline_s=5)
    assert (done.acknowledged, done.expired, done.ended, done.moved) == (1, 1, 2, 1)
    await redis.sadd(keys.PROXIES, "slow")
    await redis.set(keys.proxy_lease("slow"), "1", px=60_000)
    await set_route(redis, route(4, open=True))
    with pytest.raises(RouteOvertaken, match="epoch 3 was overtaken by 4"):
        await wait_acknowledged(redis, closed, deadline_s=60)


async def test_proxies_hear_of_a_changed_route(redis: Redis) -> None:
    async with redis.pubsub() as heard:
        await heard.subscribe(keys.ROUTES_CHANGED)
        assert (await heard.get_message(timeout=5))["type"] == "subscribe"
        await set_route(redis, route(1, open=True))
        assert (await heard.get_message(timeout=5))["data"] == b"cell-0"
