"""What Redis holds of routes, proxies and unfinished episodes, read in few round trips. Reads only.

It doesn't say what the waits mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.state import keys
from infra.state.redis import text
from trajectory.records import RecordError, decode

LAST_RECORDS: Final = 64
"""Of at most this many episodes the last call record is read: a record may be large."""


class UnfinishedCall(BaseModel):
    """As a proxy writes it (`keys.open_calls`); what else it writes is not needed here."""

    proxy: str
    cell: str
    since: float


class EpisodeState(BaseModel):
    """An unfinished episode. Times are Unix seconds. Texts and numbers may come as Redis' bytes."""

    model_config = ConfigDict(frozen=True)

    generation: int = 1
    calls: int = 0
    last_end: float | None = None
    """When its last finished call ended; None when there is none, or it wasn't read."""
    held_s: float = 0.0
    holding: dict[str, float] = {}
    """Call -> since when it is held."""
    opened: dict[str, UnfinishedCall] = {}
    lease: str = ""
    """``generation:pid`` of the supervisor that holds it; empty for none."""
    versions: tuple[int, int] | None = None
    """Its calls may be served by these weight versions; None while it has no key."""


class SharedState(BaseModel):
    """What all proxies and cells share."""

    model_config = ConfigDict(frozen=True)

    routes: dict[str, keys.Route] = {}
    proxies: frozenset[str] = frozenset()
    """Ids of those that live."""
    fault: str = ""
    """Why Redis can't be read; then nothing else is known."""


async def read_shared(redis: Redis) -> SharedState:
    try:
        table = await redis.hgetall(keys.ROUTES)
        members = sorted(text(name) for name in await redis.smembers(keys.PROXIES))
        alive = frozenset([proxy for proxy in members if await redis.exists(keys.proxy_lease(proxy))])
    except (RedisError, OSError) as error:
        return SharedState(fault=f"{type(error).__name__}: {error}")
    routes = sorted((keys.Route.model_validate_json(data) for data in table.values()), key=lambda route: route.cell)
    return SharedState(routes={route.cell: route for route in routes}, proxies=alive)


async def read_episodes(redis: Redis, episodes: Sequence[str]) -> dict[str, EpisodeState]:
    """By the episode's name. Raises RedisError."""
    heads = await _rows(redis, [[("GET", keys.records_of(e)), ("GET", keys.generation_of(e))] for e in episodes])
    names = [text(records) if records else episode for episode, (records, _) in zip(episodes, heads, strict=True)]
    last = (-1, -1) if len(episodes) <= LAST_RECORDS else (1, 0)
    bodies = await _rows(
        redis,
        [
            [
                ("LRANGE", keys.calls(name), *last),
                ("LLEN", keys.calls(name)),
                ("GET", keys.held(name)),
                ("HGETALL", keys.holding(name)),
                ("HGETALL", keys.open_calls(name)),
                ("GET", keys.lease(name)),
                ("GET", keys.api_key_of(name)),
            ]
            for name in names
        ],
    )
    stands_for = await _rows(redis, [[("GET", keys.key(text(secret)))] if secret else [] for *_, secret in bodies])
    return {
        episode: EpisodeState(
            generation=generation or 1,
            last_end=_ended(records[0]) if records else None,
            calls=calls,
            held_s=held or 0.0,
            holding=holding,
            opened={rid: UnfinishedCall.model_validate_json(data) for rid, data in opened.items()},
            lease=lease or "",
            versions=_versions(*key),
        )
        for episode, (_, generation), (records, calls, held, holding, opened, lease, _), key in zip(
            episodes, heads, bodies, stands_for, strict=True
        )
    }


async def _rows(redis: Redis, commands: list[list[tuple[Any, ...]]]) -> list[list[Any]]:
    """The answers to rows of commands, in one round trip."""
    pipe: Any = redis.pipeline(transaction=False)
    for command in (command for row in commands for command in row):
        pipe.execute_command(*command)
    answers = iter(await pipe.execute())
    return [[next(answers) for _ in row] for row in commands]


def _versions(data: bytes | None = None) -> tuple[int, int] | None:
    if not data:
        return None
    key = keys.EpisodeKey.model_validate_json(data)
    return key.min_version, key.max_version


def _ended(data: bytes) -> float | None:
    try:
        record = decode(data)
    except RecordError:
        return None
    return record.started_at + record.active_s + record.held_s
