"""The HTTP face: paths, bodies, waiting answers and streams. Everything else is behind ``Gateway.call``.

A stream is opened as soon as its call is admitted, and pinged until its turn is finished; the turn is then sent
whole. For harnesses that don't survive a stream which breaks, it is opened only then. The endpoints of models are plain
ASGI callables: they have to see disconnects, and they are the hot path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy import auth
from proxy.calls.episodes import Attempt, Connection
from proxy.calls.gateway import Gateway, Read
from proxy.conversation.requests import ModelRequest, Turn
from proxy.dialects import anthropic, openai_chat
from proxy.dialects.dialect import Dialect
from proxy.dialects.openapi import openapi
from proxy.dialects.registry import DIALECTS
from proxy.errors import BodyTooLarge, GatewayError, NoCell, Unavailable, UnknownPath

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Parse = Callable[[bytes, Mapping[bytes, bytes]], ModelRequest]
Answer = TypeVar("Answer")

MODEL = "gyre-policy"
_JSON = (b"content-type", b"application/json")
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ClientGone(Exception):
    """The client closed its connection."""


def create_app(gateway: Gateway, serving: Callable[[], None] = lambda: None) -> FastAPI:
    """The application. It starts and stops the gateway's router with its own lifespan; ``serving`` is called when the
    router has started."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.router.start()
        serving()
        yield
        await gateway.stop()
        await gateway.router.stop()

    async def models(_: Request) -> Response:
        return _json(openai_chat.models(MODEL))

    async def hello(_: Request) -> Response:
        return Response()  # a harness looks at its start whether anybody is there

    async def document(_: Request) -> Response:
        return _json(orjson.dumps(openapi()))

    async def healthz(_: Request) -> Response:
        return _json(orjson.dumps(gateway.status()))

    async def unknown(request: Request, _: Exception) -> Response:
        fault = UnknownPath(f"{request.method} {request.url.path}")
        dialect: Dialect = anthropic if b"anthropic-version" in dict(request.scope["headers"]) else openai_chat
        return _json(dialect.error(fault), fault.status)

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.add_exception_handler(404, unknown)
    app.add_exception_handler(405, unknown)
    for dialect in DIALECTS:
        for path in dialect.PATHS:
            app.router.routes.append(Route(path, Model(dialect, dialect.parse, gateway), methods=["POST"]))
    count_tokens = CountTokens(anthropic, anthropic.parse_count, gateway)
    app.router.routes.append(Route(anthropic.COUNT_PATH, count_tokens, methods=["POST"]))
    app.add_route("/v1/models", models, methods=["GET"])
    app.add_route("/api/hello", hello, methods=["GET", "HEAD"])
    app.add_route("/openapi.json", document, methods=["GET"])
    app.add_route("/healthz", healthz, methods=["GET"])
    return app


class Endpoint:
    """ASGI endpoint of one dialect's requests, which ``parse`` reads."""

    def __init__(self, dialect: Dialect, parse: Parse, gateway: Gateway) -> None:
        self._dialect, self._parse, self._gateway, self._limits = dialect, parse, gateway, gateway.limits

    async def _asked(
        self, scope: Scope, receive: Receive, send: Send, ask: Callable[[str, Read], Awaitable[Answer]]
    ) -> Answer | None:
        """What the gateway says to a request; None when it was refused, or its client has gone."""
        headers = dict(scope["headers"])

        async def read() -> ModelRequest:
            return self._parse(await read_body(headers, receive, self._limits.body_bytes), headers)

        try:
            return await ask(auth.api_key(scope["headers"]), read)
        except ClientGone:
            pass
        except GatewayError as fault:
            await _refuse(self._dialect, send, fault)
        return None


class Model(Endpoint):
    """Calls."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get("state", {}).get("connection") or Connection()
        asked = await self._asked(scope, receive, send, partial(self._gateway.call, connection=connection))
        if asked is None:
            return
        request, attempt = asked
        gone = asyncio.get_running_loop().create_task(_disconnected(receive))
        delivered = False
        try:
            answer = self._stream if request.stream and attempt.early_stream else self._answer
            delivered = await answer(request, attempt, gone, send)
        finally:
            gone.cancel()
            self._gateway.answered(attempt, connection, delivered=delivered)

    async def _answer(self, request: ModelRequest, attempt: Attempt, gone: asyncio.Task[None], send: Send) -> bool:
        """Wait and answer, with one message; returns whether the turn was delivered."""
        await _either(attempt.turn, gone, attempt.answer_s)
        if gone.done():
            return False
        if not attempt.turn.done():  # the call goes on; the same request finds it again
            await _refuse(self._dialect, send, NoCell("the call is held, please ask again"))
            return False
        try:
            turn = attempt.turn.result()
        except GatewayError as fault:
            await _refuse(self._dialect, send, fault)
            return False
        if request.stream:
            body = self._dialect.stream_start(request, attempt.head) + self._dialect.stream_turn(request, turn)
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
            await send({"type": "http.response.body", "body": body})
        else:
            await _respond(send, 200, self._dialect.response(request, turn))
        return True

    async def _stream(self, request: ModelRequest, attempt: Attempt, gone: asyncio.Task[None], send: Send) -> bool:
        """Open, wait with pings, and send the finished turn; returns whether it was delivered."""
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        await _part(send, self._dialect.stream_start(request, attempt.head))
        while not attempt.turn.done() and not gone.done():
            await _either(attempt.turn, gone, self._limits.ping_s)
            if not attempt.turn.done() and not gone.done():
                await _part(send, self._dialect.PING)
        if gone.done():
            return False
        try:
            body, delivered = self._dialect.stream_turn(request, attempt.turn.result()), True
        except GatewayError as fault:
            body, delivered = self._dialect.stream_error(fault), False
        await send({"type": "http.response.body", "body": body})
        return delivered


class CountTokens(Endpoint):
    """POST /v1/messages/count_tokens: what a request would cost. Nothing is recorded."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        count = await self._asked(scope, receive, send, self._gateway.count_tokens)
        if count is not None:
            await _respond(send, 200, anthropic.count_tokens(count))


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, limit: int) -> bytes:
    """A request's body of at most ``limit`` bytes. Raises BodyTooLarge before reading more, and ClientGone."""
    too_large = BodyTooLarge(f"the body is larger than {limit} bytes")
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large
        if not message.get("more_body"):
            return b"".join(parts)


async def _either(turn: asyncio.Future[Turn], gone: asyncio.Future[None], timeout_s: float) -> None:
    """Wait until the turn is there, the client has gone, or the time is over."""
    waits: set[asyncio.Future[Any]] = {turn, gone}
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(dialect: Dialect, send: Send, fault: GatewayError) -> None:
    headers = [(b"retry-after", str(fault.retry_after).encode())] if isinstance(fault, Unavailable) else []
    await _respond(send, fault.status, dialect.error(fault), headers)


async def _part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _respond(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")
