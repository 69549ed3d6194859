"""The route table: which cells proxies may send requests to. Changed only by compare-and-set in Redis.

Invariant: a route's epoch never decreases, so an order that was overtaken cannot reopen (or close) a route. A closed
route is drained only when every proxy has acknowledged that epoch or its lease has run out, however long it may take.
"""

from __future__ import annotations

import asyncio
import time

from redis.asyncio import Redis

from infra.state import keys
from infra.state.keys import Drained, Route
from infra.state.redis import text
from workflows.contracts.orders import DrainResult

POLL_S = (0.02, 0.2)
"""Acknowledgements are looked for this often at first, and this seldom in a long wait."""

_SET = """
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old then
  local route = cjson.decode(old)
  if route.epoch > tonumber(ARGV[3]) then return route.epoch end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('PUBLISH', ARGV[4], ARGV[1])
return -1
"""


class RouteOvertaken(RuntimeError):
    """A newer epoch has set the route already: the order is obsolete."""


class DrainTimeout(RuntimeError):
    """A live proxy still has requests on a closed route."""


async def set_route(redis: Redis, route: Route) -> None:
    """Write a route and tell every proxy. Raises RouteOvertaken when the table holds a newer epoch."""
    newer = await redis.eval(
        _SET, 1, keys.ROUTES, route.cell, route.model_dump_json(), str(route.epoch), keys.ROUTES_CHANGED
    )
    if int(newer) >= 0:
        raise RouteOvertaken(f"route of {route.cell}: epoch {route.epoch} was overtaken by {int(newer)}")


async def get_route(redis: Redis, cell: str) -> Route | None:
    data = await redis.hget(keys.ROUTES, cell)
    return Route.model_validate_json(data) if data else None


async def all_routes(redis: Redis) -> dict[str, Route]:
    table = await redis.hgetall(keys.ROUTES)
    routes = [Route.model_validate_json(data) for data in table.values()]
    return {route.cell: route for route in sorted(routes, key=lambda route: route.cell)}


async def wait_acknowledged(redis: Redis, route: Route, deadline_s: float) -> DrainResult:
    """Wait until every proxy has said that no request is left on a closed route, or its lease has run out.

    Raises DrainTimeout ``deadline_s`` seconds after the route's ``drain_s`` are over, and RouteOvertaken as soon as a
    newer epoch has set the route: nobody acknowledges this one any more.
    """
    started = time.monotonic()
    wanted = f"{route.incarnation}:{route.epoch}"
    while True:
        pipeline = redis.pipeline()  # a transaction: the counts are those of the acknowledgements
        pipeline.smembers(keys.PROXIES)
        pipeline.hgetall(keys.route_acks(route.cell))
        pipeline.hgetall(keys.route_drains(route.cell))
        pipeline.hget(keys.ROUTES, route.cell)
        members, acks, drains, table_entry = await pipeline.execute()
        proxies = sorted(text(name) for name in members)
        done = {text(proxy) for proxy, ack in acks.items() if text(ack) == wanted}
        silent = [proxy for proxy in proxies if proxy not in done]
        alive = [proxy for proxy in silent if await redis.exists(keys.proxy_lease(proxy))]
        passed = time.monotonic() - started
        if not alive:
            if silent:
                await redis.srem(keys.PROXIES, *silent)
            counts = [Drained.model_validate_json(data) for proxy, data in drains.items() if text(proxy) in done]
            return DrainResult(
                acknowledged=len(proxies) - len(silent),
                expired=len(silent),
                seconds=passed,
                ended=sum(count.ended for count in counts),
                moved=sum(count.moved for count in counts),
            )
        if table_entry is not None and (newer := Route.model_validate_json(table_entry).epoch) > route.epoch:
            raise RouteOvertaken(f"drain of {route.cell}: epoch {route.epoch} was overtaken by {newer}")
        if passed > deadline_s + route.drain_s:
            raise DrainTimeout(f"{', '.join(alive)} still use {route.cell} {passed:.0f} s after its route closed")
        await asyncio.sleep(min(max(passed / 20, POLL_S[0]), POLL_S[1]))
