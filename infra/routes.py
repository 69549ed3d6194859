"""The route table: which cells proxies may send requests to. Changed only by compare-and-set in Redis.

Invariant: a route's epoch never decreases, so an order that was overtaken cannot reopen (or close) a route.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from redis.asyncio import Redis

from infra import keys
from infra.keys import Route

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


@dataclass(frozen=True)
class Acknowledged:
    acknowledged: int
    expired: int
    seconds: float


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


async def wait_acknowledged(redis: Redis, route: Route, deadline_s: float) -> Acknowledged:
    """Wait until every proxy has said that no request is left on a closed route, or its lease has run out.

    Raises DrainTimeout after ``deadline_s`` seconds.
    """
    started = time.monotonic()
    wanted = f"{route.incarnation}:{route.epoch}"
    while True:
        proxies = sorted(_text(name) for name in await redis.smembers(keys.PROXIES))
        acks = {_text(name): _text(ack) for name, ack in (await redis.hgetall(keys.route_acks(route.cell))).items()}
        silent = [proxy for proxy in proxies if acks.get(proxy) != wanted]
        alive = [proxy for proxy in silent if await redis.exists(keys.proxy_lease(proxy))]
        if not alive:
            if silent:
                await redis.srem(keys.PROXIES, *silent)
            return Acknowledged(len(proxies) - len(silent), len(silent), time.monotonic() - started)
        if time.monotonic() - started > deadline_s:
            raise DrainTimeout(f"{', '.join(alive)} still use {route.cell} {deadline_s:.0f} s after its route closed")
        await asyncio.sleep(0.02)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
