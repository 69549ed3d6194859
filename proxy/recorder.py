"""The durable side of a call: open record, hold, and the record of the finished call, all in Redis.

Invariant: a record is appended only at its own number and only by the episode's current generation, in one script
with its turn note, the end of its open record and its held time. So a call is either open or recorded, never both,
and a record that was appended twice, or by a dead generation, cannot exist.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal, cast

import msgspec
import redis.exceptions
from redis.asyncio import Redis

from infra import keys

APPEND = """
local generation = redis.call('GET', KEYS[3])
if generation and tonumber(ARGV[2]) < tonumber(generation) then return 'generation' end
local length = redis.call('LLEN', KEYS[1])
if length > tonumber(ARGV[1]) then return 'behind' end
if length < tonumber(ARGV[1]) then return 'lost' end
redis.call('RPUSH', KEYS[1], ARGV[4])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[5])
redis.call('HDEL', KEYS[4], ARGV[3])
redis.call('HDEL', KEYS[5], ARGV[3])
if tonumber(ARGV[6]) > 0 then redis.call('INCRBYFLOAT', KEYS[6], ARGV[6]) end
return 'appended'
"""

Outcome = Literal["appended", "behind", "lost", "generation"]
RETRY_S = 0.2


def as_bytes(value: bytes | str) -> bytes:
    """A reply of a client that doesn't decode replies; narrows its type."""
    if isinstance(value, str):
        raise TypeError("the Redis client must not decode replies: records are bytes")
    return value


class OpenCall(msgspec.Struct, frozen=True):
    """An unfinished call, written before the engine is asked."""

    proxy: str
    cell: str
    engine_rid: str
    """Request id at the engine of ``cell``."""
    digest: str
    """Of the request (hex)."""
    since: float
    """Unix time in seconds."""


class Recorder:
    def __init__(self, redis: Redis, *, patience_s: float) -> None:
        self._redis = redis
        self._append = redis.register_script(APPEND)
        self._patience_s = patience_s

    async def open(self, episode: str, rid: str, call: OpenCall) -> None:
        await self._redis.hset(keys.open_calls(episode), rid, msgspec.json.encode(call))

    async def drop(self, episode: str, rid: str) -> None:
        """End a call that will not be recorded."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hdel(keys.open_calls(episode), rid)
        pipeline.hdel(keys.holding(episode), rid)
        await pipeline.execute()

    async def opened(self, episode: str) -> dict[str, OpenCall]:
        """Unfinished calls of an episode, of every proxy, by request id."""
        found = await self._redis.hgetall(keys.open_calls(episode))
        return {as_bytes(rid).decode(): msgspec.json.decode(data, type=OpenCall) for rid, data in found.items()}

    async def hold(self, episode: str, rid: str) -> None:
        await self._redis.hset(keys.holding(episode), rid, repr(time.time()))

    async def unhold(self, episode: str, rid: str, held_s: float) -> None:
        """End a hold and credit its seconds in one transaction: at no moment do they count as active."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hdel(keys.holding(episode), rid)
        pipeline.incrbyfloat(keys.held(episode), held_s)
        await pipeline.execute()

    async def append(
        self, episode: str, *, seq: int, generation: int, rid: str, record: bytes, note: bytes, held_s: float
    ) -> Outcome:
        """Append a record. ``held_s``: seconds not yet credited by ``unhold``.

        ``behind``: there are records that this proxy has not read (perhaps this very one, when an earlier try was
        cut off after it took effect). ``lost``: Redis has fewer records than were appended. Raises redis'
        ConnectionError when Redis stays away for the patience given.
        """
        names = [keys.calls(episode), keys.turns(episode), keys.generation_of(episode)]
        names += [keys.open_calls(episode), keys.holding(episode), keys.held(episode)]
        values: list[bytes | str | int] = [seq, generation, rid, record, note, repr(round(held_s, 6))]
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return cast(Outcome, (await self._append(keys=names, args=values)).decode())
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)  # Redis restarts; there is nothing to await

    async def count(self, episode: str) -> int:
        """Number of recorded calls."""
        return int(await self._redis.llen(keys.calls(episode)))

    async def read(self, episode: str, start: int) -> list[tuple[bytes, bytes | None]]:
        """Records from number ``start`` on, each with its note."""
        records = [as_bytes(data) for data in await self._redis.lrange(keys.calls(episode), start, -1)]
        if not records:
            return []
        numbers = [str(start + position) for position in range(len(records))]
        notes: list[Any] = await self._redis.hmget(keys.turns(episode), numbers)
        return list(zip(records, notes, strict=True))

    async def truncate(self, episode: str, why: Literal["context", "calls"]) -> None:
        """Note that further calls of the episode are refused."""
        await self._redis.set(keys.truncated(episode), why)
