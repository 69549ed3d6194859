"""The durable side of a call: open record, hold, and the record of the finished call, all in Redis.

Invariant: a record is appended only at its own number and only by the episode's current generation, in one script
with its stored turn, the end of its open record and its held time. So a call is either open or recorded, never both,
and a record that was appended twice, or by a dead generation, cannot exist.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal, cast

import msgspec
import redis.exceptions
from redis.asyncio import Redis

from infra.state import keys
from infra.state.redis import as_bytes, text
from proxy.conversation.requests import Turn

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
redis.call('HDEL', KEYS[7], ARGV[7])
redis.call('HDEL', KEYS[8], ARGV[3])
if redis.call('GET', KEYS[9]) == 'context' then redis.call('DEL', KEYS[9]) end
if tonumber(ARGV[6]) > 0 then redis.call('INCRBYFLOAT', KEYS[6], ARGV[6]) end
return 'appended'
"""

Outcome = Literal["appended", "behind", "lost", "generation"]
RETRY_S = 0.2


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


class LeftCall(msgspec.Struct, frozen=True):
    """An unfinished call whose connection has closed. Another proxy may be asked for it."""

    proxy: str
    turn_id: str
    created: int
    prompt_tokens: int


class Recorder:
    def __init__(self, redis: Redis, proxy_id: str, *, patience_s: float) -> None:
        self._redis = redis
        self._proxy_id = proxy_id
        self._append = redis.register_script(APPEND)
        self._patience_s = patience_s

    async def open(self, episode: str, rid: str, *, cell: str, engine_rid: str, digest: bytes) -> None:
        """An engine is about to be asked. ``digest``: of the request."""
        call = OpenCall(self._proxy_id, cell, engine_rid, digest.hex(), time.time())
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hset(keys.open_calls(episode), rid, msgspec.json.encode(call))
        pipeline.hset(keys.proxy_calls(self._proxy_id), rid, episode)
        await pipeline.execute()

    async def drop(self, episode: str, rid: str, name: bytes) -> None:
        """End a call that will not be recorded."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hdel(keys.open_calls(episode), rid)
        pipeline.hdel(keys.holding(episode), rid)
        pipeline.hdel(keys.left_calls(episode), name.hex())
        pipeline.hdel(keys.proxy_calls(self._proxy_id), rid)
        await pipeline.execute()

    async def reap(self, episode: str, rid: str) -> None:
        """End a call of a dead proxy."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hdel(keys.open_calls(episode), rid)
        pipeline.hdel(keys.holding(episode), rid)
        await pipeline.execute()

    async def leave(self, episode: str, name: bytes, head: Turn) -> None:
        """The connection of an unfinished call has closed: the next one may come to another proxy."""
        call = LeftCall(self._proxy_id, head.turn_id, head.created, head.prompt_tokens)
        await self._redis.hset(keys.left_calls(episode), name.hex(), msgspec.json.encode(call))

    async def forget_left(self, episode: str, name: bytes) -> None:
        """The call is asked for again where it runs, or its proxy is dead."""
        await self._redis.hdel(keys.left_calls(episode), name.hex())

    async def want(self, episode: str, name: bytes) -> bool:
        """Say that another proxy's call is waited for. Returns whether it is still unfinished."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hset(keys.wanted_calls(episode), name.hex(), repr(time.time()))
        pipeline.hexists(keys.left_calls(episode), name.hex())
        return bool((await pipeline.execute())[1])

    async def wanted_at(self, episode: str, name: bytes) -> float:
        """Unix time at which another proxy last waited for the call; 0 for never."""
        return float(await self._redis.hget(keys.wanted_calls(episode), name.hex()) or 0.0)

    async def alive(self, proxy: str) -> bool:
        return bool(await self._redis.exists(keys.proxy_lease(proxy)))

    async def count_up(self, episode: str, what: Literal["replayed", "disagreements"], by: int = 1) -> None:
        await self._redis.hincrby(keys.counts(episode), what, by)

    async def calls_of(self, proxy: str) -> dict[str, str]:
        """Unfinished calls of a proxy: request id -> episode."""
        calls = await self._redis.hgetall(keys.proxy_calls(proxy))
        return {text(rid): text(episode) for rid, episode in calls.items()}

    async def forget_proxy(self, proxy: str) -> None:
        """A dead proxy's calls have been ended."""
        await self._redis.delete(keys.proxy_calls(proxy))

    async def held_calls(self, episode: str) -> list[str]:
        """Request ids of the calls that are being held."""
        return [text(rid) for rid in await self._redis.hkeys(keys.holding(episode))]

    async def opened(self, episode: str) -> dict[str, OpenCall]:
        """Unfinished calls of an episode, of every proxy, by request id."""
        calls = await self._redis.hgetall(keys.open_calls(episode))
        return {text(rid): msgspec.json.decode(data, type=OpenCall) for rid, data in calls.items()}

    async def hold(self, episode: str, rid: str) -> None:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hset(keys.holding(episode), rid, repr(time.time()))
        pipeline.hset(keys.proxy_calls(self._proxy_id), rid, episode)
        await pipeline.execute()

    async def unhold(self, episode: str, rid: str, held_s: float) -> None:
        """End a hold and credit its seconds in one transaction: at no moment do they count as active."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hdel(keys.holding(episode), rid)
        pipeline.incrbyfloat(keys.held(episode), held_s)
        await pipeline.execute()

    async def append(
        self,
        episode: str,
        *,
        seq: int,
        generation: int,
        rid: str,
        name: bytes,
        record: bytes,
        stored: bytes,
        held_s: float,
    ) -> Outcome:
        """Append a record. ``held_s``: seconds not yet credited by ``unhold``. An episode whose context was refused
        before has found its way on (by a compaction): it isn't truncated.

        ``behind``: there are records that this proxy has not read (perhaps this very one, when an earlier try was
        cut off after it took effect). ``lost``: Redis has fewer records than were appended. Raises redis'
        ConnectionError when Redis stays away for the patience given.
        """
        names = [keys.calls(episode), keys.turns(episode), keys.generation_of(episode)]
        names += [keys.open_calls(episode), keys.holding(episode), keys.held(episode)]
        names += [keys.left_calls(episode), keys.proxy_calls(self._proxy_id), keys.truncated(episode)]
        values: list[bytes | str | int] = [seq, generation, rid, record, stored, repr(round(held_s, 6)), name.hex()]
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
        """Records from number ``start`` on, each with its stored turn."""
        records = [as_bytes(data) for data in await self._redis.lrange(keys.calls(episode), start, -1)]
        if not records:
            return []
        numbers = [str(start + position) for position in range(len(records))]
        turns: list[Any] = await self._redis.hmget(keys.turns(episode), numbers)
        return list(zip(records, turns, strict=True))

    async def truncate(self, episode: str, why: Literal["context", "calls"]) -> None:
        """Note that further calls of the episode are refused."""
        await self._redis.set(keys.truncated(episode), why)
