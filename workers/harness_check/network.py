"""A bad network between a harness and the gateway: a relay, for tests only, that drops chosen connections.

Faults go by the number of the model request, from 1. What the gateway is sent and what it answers is never changed,
only cut off: so whatever a harness then asks again is its own doing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final, Literal

import aiohttp
from aiohttp import web

Fault = Literal["unanswered", "halved", "cut", "closed", "twice"]
"""``unanswered``: dropped before the first byte of the answer. ``halved``: in the middle of it. ``cut``: before its
last bytes. ``closed``: after its last byte. ``twice``: the gateway loses the connection, and gets the same request
again on another."""

CUT_BYTES: Final = 40
HOP_BY_HOP: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host"})
WAIT_S: Final = 60.0


class FaultyRelay:
    """Listens on ``path`` and relays to ``upstream``, both unix sockets."""

    def __init__(self, upstream: Path, path: Path, faults: Mapping[int, Fault]) -> None:
        self.path = path
        self.done: list[Fault] = []
        """Faults that took place."""
        self._upstream, self._faults = upstream, faults
        self._calls = 0
        self._session: aiohttp.ClientSession

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # a connection of its own for each request: to the gateway a dropped one is closed at once
        connector = aiohttp.UnixConnector(str(self._upstream), limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._relay)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
        await runner.setup()
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as self._session:
            await web.UnixSite(runner, str(self.path)).start()
            self.path.chmod(0o666)
            try:
                yield
            finally:
                await runner.cleanup()

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self._calls += request.method == "POST"
        fault = self._faults.get(self._calls) if request.method == "POST" else None
        if fault is not None:
            self.done.append(fault)
        if fault in ("unanswered", "twice"):
            await self._sent_and_lost(request, body)
            if fault == "unanswered":
                return await self._dropped(request)
        async with self._ask(request, body) as answer:
            response = web.StreamResponse(status=answer.status, headers=_passed(answer.headers))
            if (length := answer.content_length) is not None:
                response.content_length = length
            await response.prepare(request)
            if fault in ("halved", "cut"):
                whole = await answer.read()
                await response.write(whole[: len(whole) // 2] if fault == "halved" else whole[:-CUT_BYTES])
                return await self._dropped(request)
            async for data in answer.content.iter_any():
                await response.write(data)
        await response.write_eof()
        if fault == "closed":
            return await self._dropped(request)
        return response

    async def _sent_and_lost(self, request: web.Request, body: bytes) -> None:
        """Send the request, and drop the connection as soon as the gateway has begun to answer."""
        async with asyncio.timeout(WAIT_S), self._ask(request, body):
            pass

    def _ask(self, request: web.Request, body: bytes) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = _passed(request.headers)
        return self._session.request(request.method, f"http://gateway{request.path_qs}", data=body, headers=headers)

    @staticmethod
    async def _dropped(request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()  # goes nowhere


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}
