"""What Redis holds of routes, proxies and unfinished episodes, read in few round trips. Reads only.

It doesn't say what the waits mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.state import keys
from trajectory.records import RecordError, decode

LAST_RECORDS: Final = 64
"""Of at most this many episodes the last call record is read: a record may be large."""


class OpenCall(msgspec.Struct, frozen=True):
    """An unfinished call, as a proxy writes it (`keys.open_calls`)."""

    proxy: str
    cell: str
    since: float


@dataclass(frozen=True)
class Spoken:
    """An unfinished episode. Times are Unix seconds."""

    records: str
    """Name of its call records."""
    generation: int = 1
    restarts: tuple[str, ...] = ()
    calls: int = 0
    last_end: float | None = None
    """When its last finished call ended; None when there is none, or it wasn't read."""
    held_s: float = 0.0
    holding: dict[str, float] = field(default_factory=dict)
    """Call -> since when it is held."""
    opened: dict[str, OpenCall] = field(default_factory=dict)
    lease: str = ""
    """``generation:pid`` of the supervisor that holds it; empty for none."""
    versions: tuple[int, int] | None = None
    """Its calls may be served by these weight versions; None while it has no key."""

    def proxy_of(self, call: str) -> str:
        return call.rpartition(".")[0]


@dataclass(frozen=True)
class Shared:
    """The state that all proxies and cells share."""

    routes: dict[str, keys.Route] = field(default_factory=dict)
    proxies: frozenset[str] = frozenset()
    """Ids of those that live."""
    fault: str = ""
    """Why Redis can't be read; then nothing else is known."""


async def read_shared(redis: Redis) -> Shared:
    try:
        table = await redis.hgetall(keys.ROUTES)
        members = sorted(_text(name) for name in await redis.smembers(keys.PROXIES))
        alive = [proxy for proxy in members if await redis.exists(keys.proxy_lease(proxy))]
    except (RedisError, OSError) as error:
        return Shared(fault=f"{type(error).__name__}: {error}")
    routes = [keys.Route.model_validate_json(data) for data in table.values()]
    return Shared({route.cell: route for route in sorted(routes, key=lambda route: route.cell)}, frozenset(alive))


async def read_episodes(redis: Redis, episodes: Sequence[str]) -> dict[str, Spoken]:
    """By the episode's name. Raises RedisError."""
    if not episodes:
        return {}
    pipe = redis.pipeline(transaction=False)
    for episode in episodes:
        pipe.get(keys.records_of(episode))
        pipe.get(keys.generation_of(episode))
        pipe.hgetall(keys.restarts(episode))
    heads = await _answers(pipe, 3)
    records = [_text(head[0]) if head[0] else episode for episode, head in zip(episodes, heads, strict=True)]
    pipe = redis.pipeline(transaction=False)
    first, until = (-1, -1) if len(episodes) <= LAST_RECORDS else (1, 0)
    for name in records:
        pipe.llen(keys.calls(name))
        pipe.lrange(keys.calls(name), first, until)
        pipe.get(keys.held(name))
        pipe.hgetall(keys.holding(name))
        pipe.hgetall(keys.open_calls(name))
        pipe.get(keys.lease(name))
        pipe.get(keys.api_key_of(name))
    bodies = await _answers(pipe, 7)
    versions = await _versions(redis, [body[6] for body in bodies])
    return {
        episode: _spoken(name, head, body, versions.get(body[6]))
        for episode, name, head, body in zip(episodes, records, heads, bodies, strict=True)
    }


async def _answers(pipe: Any, width: int) -> list[list[Any]]:
    """The answers of a pipeline in rows of ``width``."""
    flat = await pipe.execute()
    return [flat[start : start + width] for start in range(0, len(flat), width)]


async def _versions(redis: Redis, secrets: Sequence[Any]) -> dict[Any, tuple[int, int]]:
    known = [secret for secret in secrets if secret]
    if not known:
        return {}
    found = await redis.mget([keys.key(_text(secret)) for secret in known])
    stands_for = {
        secret: keys.EpisodeKey.model_validate_json(data) for secret, data in zip(known, found, strict=True) if data
    }
    return {secret: (key.min_version, key.max_version) for secret, key in stands_for.items()}


def _spoken(records: str, head: list[Any], body: list[Any], versions: tuple[int, int] | None) -> Spoken:
    _, generation, restarts = head
    calls, last, held, holding, opened, lease, _secret = body
    return Spoken(
        records=records,
        generation=int(generation or 1),
        restarts=tuple(_text(restarts[number]) for number in sorted(restarts, key=int)),
        calls=int(calls),
        last_end=_ended(last[0]) if last else None,
        held_s=float(held or 0.0),
        holding={_text(rid): float(since) for rid, since in holding.items()},
        opened={_text(rid): msgspec.json.decode(data, type=OpenCall) for rid, data in opened.items()},
        lease=_text(lease) if lease else "",
        versions=versions,
    )


def _ended(data: bytes) -> float | None:
    try:
        record = decode(data)
    except RecordError:
        return None
    return record.started_at + record.active_s + record.held_s


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
