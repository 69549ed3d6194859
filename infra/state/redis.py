"""Clients of the shared state, all of one kind: they answer bytes.

Decided once, because call records and the messages behind them are bytes of their own (``trajectory.records``): a
client that decodes breaks on the first of them. pydantic and msgspec read JSON from bytes; what is text becomes
``text`` where it is read. The supervisor of an episode is the exception: it speaks to Redis by itself, in texts only,
and is told an address instead of a URL.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis, SSLConnection
from redis.asyncio.connection import parse_url


def redis_client(url: str, **options: Any) -> Redis:
    """To be closed with ``aclose``. ``options``: of the client, beside ``decode_responses``."""
    return Redis.from_url(url, decode_responses=False, **options)


def as_bytes(answer: bytes | str) -> bytes:
    """An answer of a client that doesn't decode; narrows its type. Raises TypeError for one that does."""
    if isinstance(answer, str):
        raise TypeError("the Redis client must not decode its answers: records are bytes")
    return answer


def text(answer: bytes | str) -> str:
    """An answer that is text."""
    return answer if isinstance(answer, str) else answer.decode()


def redis_address(url: str) -> dict[str, Any]:
    """Parts of a redis://, rediss:// or unix:// URL, for JSON. Raises ValueError for another."""
    given: dict[str, Any] = {**parse_url(url)}
    tls = given.pop("connection_class", None) is SSLConnection
    address = {"username": "", "password": "", "db": 0, **given}
    return address if "path" in given else {"host": "localhost", "port": 6379, "tls": tls, **address}
