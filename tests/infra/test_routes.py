"""The route table under overtaken orders, silent proxies and dead ones, on a real Valkey."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from infra import keys
from infra.keys import Route
from infra.routes import DrainTimeout, RouteOvertaken, get_route, set_route, wait_acknowledged


def route(epoch: int, *, open: bool, version: int = 0) -> Route:
    return Route(cell="cell-0", url="http://127.0.0.1:1", incarnation="i", epoch=epoch, open=open, version=version)


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


async def test_proxies_hear_of_a_changed_route(redis: Redis) -> None:
    async with redis.pubsub() as heard:
        await heard.subscribe(keys.ROUTES_CHANGED)
        assert (await heard.get_message(timeout=5))["type"] == "subscribe"
        await set_route(redis, route(1, open=True))
        assert (await heard.get_message(timeout=5))["data"] == b"cell-0"
