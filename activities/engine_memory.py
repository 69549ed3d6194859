"""Whether a cell's engine has given up its serving memory, known to every worker that the cell ever has.

SGLang doesn't say, and ends itself when it is told to take back what it holds. Invariant: what is kept names the start
of the server that it is true of, and is written before memory is given up and removed after it was taken back; a
worker that dies in between costs at most a restart of the engine, never an engine that serves without its memory.
"""

from __future__ import annotations

from redis.asyncio import Redis

from infra.sglang.client import EngineClient
from infra.state import keys
from infra.state.redis import text


class EngineMemory:
    def __init__(self, redis: Redis, engine: EngineClient, cell: str) -> None:
        self._redis, self._engine = redis, engine
        self._key = keys.engine_memory(cell)

    async def release(self) -> str:
        """The incarnation whose memory is given up. Raises EngineError when the engine doesn't answer."""
        incarnation = await self._engine.incarnation()
        if await self._state() != f"released {incarnation}":
            await self._redis.set(self._key, f"releasing {incarnation}")
            await self._engine.release_memory()
            incarnation = await self._engine.incarnation()  # it may be another start than the one that was asked
            await self._redis.set(self._key, f"released {incarnation}")
        return incarnation

    async def take_back(self) -> None:
        """Does nothing for an engine that holds its memory. Raises EngineError."""
        state = await self._state()
        if not state:
            return
        if state.rpartition(" ")[2] == await self._engine.incarnation():
            await self._engine.resume_memory()
        await self._redis.delete(self._key)

    async def _state(self) -> str:
        return text(await self._redis.get(self._key) or "")
