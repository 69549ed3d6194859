"""Who may ask: an API key stands for one generation of one episode. The key is all that a harness knows of gyre.

Everything refused here is a 400, never a 401: harnesses retry a 401 for minutes.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError
from redis.asyncio import Redis

from infra.state import keys
from proxy.errors import KeyRefused

_REMEMBERED = 4096


def api_key(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The key of a request, from ``Authorization: Bearer`` or ``x-api-key``. Raises KeyRefused if there is none."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer " and value[7:].strip():
            return value[7:].strip().decode("latin-1")
        if name == b"x-api-key" and value.strip():
            return value.strip().decode("latin-1")
    raise KeyRefused("none was given")


class Keyring:
    """Checks keys against Redis on every call, so that a revoked key is refused at once; remembers only parsing."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._read: dict[str, tuple[bytes | str, keys.EpisodeKey]] = {}

    async def admit(self, secret: str, name: bytes) -> tuple[keys.EpisodeKey, int, bytes | None]:
        """What the key stands for, the number of recorded calls of its episode, and what ``keys.left_calls`` holds for
        the request ``name``. Raises KeyRefused for an unknown, revoked or outdated key."""
        known = await self.known(secret)
        episode = known[1].episode
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.get(keys.key(secret))
        pipeline.get(keys.generation_of(episode))
        pipeline.llen(keys.calls(episode))
        pipeline.hget(keys.left_calls(episode), name.hex())
        data, generation, calls, left = await pipeline.execute()
        key = known[1] if data == known[0] else self._remember(secret, data)[1]
        if key.episode != episode or (generation is not None and key.generation < int(generation)):
            raise KeyRefused("it belongs to an older generation of its episode")
        return key, int(calls), left

    async def known(self, secret: str) -> tuple[bytes | str, keys.EpisodeKey]:
        """What the key stood for when it was first seen. Raises KeyRefused for one that never was valid."""
        known = self._read.get(secret)
        return known if known is not None else self._remember(secret, await self._redis.get(keys.key(secret)))

    def _remember(self, secret: str, data: bytes | str | None) -> tuple[bytes | str, keys.EpisodeKey]:
        self._read.pop(secret, None)
        if data is None:
            raise KeyRefused("unknown or revoked")
        try:
            key = keys.EpisodeKey.model_validate_json(data)
        except ValidationError as fault:
            raise KeyRefused("its entry is unreadable") from fault
        while len(self._read) >= _REMEMBERED:
            del self._read[next(iter(self._read))]
        self._read[secret] = (data, key)
        return self._read[secret]
