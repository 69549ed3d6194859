"""Parts of dialect tests: requests, turns, an event reader, and a scripted server of nothing but a dialect.

``ScriptedServer`` is a double of the gateway: its policy says what the script says, turn by turn. HTTP, bodies and
streams are real.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aiohttp import web

from infra.chat.messages import Message, ToolCall
from proxy.conversation.requests import ModelRequest, Turn
from proxy.dialects import anthropic
from proxy.dialects.dialect import Dialect
from proxy.dialects.registry import DIALECTS
from proxy.errors import GatewayError

TURN_ID = "AbCdEfGhIjKlMnOpQrStUv-_"


def head(turn_id: str = TURN_ID, prompt_tokens: int = 100) -> Turn:
    """A turn before it is sampled."""
    return Turn(turn_id, 1_700_000_000, prompt_tokens)


def turn(
    content: str = "",
    reasoning: str = "",
    calls: Iterable[tuple[str, str]] = (),
    *,
    finish: str = "stop",
    turn_id: str = TURN_ID,
) -> Turn:
    """A finished turn; ``calls`` are (name, arguments)."""
    minted = tuple(ToolCall(f"call_{turn_id[:20]}{index}", name, text) for index, (name, text) in enumerate(calls))
    message = Message("assistant", content, reasoning, minted, "", False, turn_id)
    return replace(head(turn_id), message=message, finish_reason=finish, output_tokens=7, cached_tokens=3)


def events(stream: bytes) -> list[tuple[str, Any]]:
    """Events of a stream: their names and their data. Fails on anything that is no event or comment."""
    read = []
    for part in stream.decode().split("\n\n")[:-1]:
        if part.startswith(":"):
            continue
        lines = dict(line.split(": ", 1) for line in part.split("\n"))
        assert set(lines) <= {"event", "data"}, part
        data = lines["data"]
        read.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    assert stream.endswith(b"\n\n")
    return read


def parse(dialect: Dialect, body: Any, headers: dict[str, str] | None = None) -> ModelRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return dialect.parse(raw, {name.encode(): value.encode() for name, value in (headers or {}).items()})


@dataclass
class ScriptedServer:
    """Serves all dialects; ``script`` says the turn to a request, or raises the refusal."""

    script: Callable[[ModelRequest, int], Turn]
    waits: float = 0.0
    """Seconds of pings before a stream's turn."""
    pings: int = 2
    url: str = ""
    requests: list[ModelRequest] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)

    async def answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.heads.append(dict(request.headers))
        self.raw.append(body)
        try:
            read = dialect.parse(body, {name.lower().encode(): v.encode() for name, v in request.headers.items()})
            number = len(self.requests)
            self.requests.append(read)
            said = self.script(read, number)
        except GatewayError as fault:
            return web.Response(body=dialect.error(fault), status=fault.status, content_type="application/json")
        if not read.stream:
            return web.Response(body=dialect.response(read, said), content_type="application/json")
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(dialect.stream_start(read, said))
        for _ in range(self.pings):
            await stream.write(dialect.PING)
            await asyncio.sleep(self.waits / self.pings)
        await stream.write(dialect.stream_turn(read, said))
        return stream

    async def count(self, request: web.Request) -> web.Response:
        anthropic.parse_count(await request.read(), {})
        return web.Response(body=anthropic.count_tokens(42), content_type="application/json")


@asynccontextmanager
async def serving(
    script: Callable[[ModelRequest, int], Turn], *, port: int = 0, waits: float = 0.0, pings: int = 2
) -> AsyncIterator[ScriptedServer]:
    """A running server on loopback; a free port unless one is given."""
    server = ScriptedServer(script, waits, pings)
    app = web.Application(client_max_size=2**30)
    for dialect in DIALECTS:
        for path in dialect.PATHS:
            app.router.add_post(path, partial(server.answer, dialect))
    app.router.add_post(anthropic.COUNT_PATH, server.count)
    app.router.add_get("/api/hello", lambda _: _hello())
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, bound = runner.addresses[0][:2]
    server.url = f"http://{host}:{bound}"
    try:
        yield server
    finally:
        await runner.cleanup()


async def _hello() -> web.Response:
    return web.Response()
