"""The HTTP face: paths, bodies, waiting answers and streams. Everything else is behind ``Gateway.call``.

A stream is opened at once and pinged until its turn is finished; the turn is then sent whole. The chat endpoint is a
plain ASGI callable: it has to see disconnects, and it is the hot path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy import auth
from proxy.calls import ModelRequest, Turn
from proxy.dialects import openai_chat
from proxy.episodes import Attempt, Connection
from proxy.errors import BodyTooLarge, GatewayError, NoCell, Unavailable, UnknownPath
from proxy.gateway import Gateway

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MODEL = "gyre-policy"
_JSON = (b"content-type", b"application/json")
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ClientGone(Exception):
    """The client closed its connection."""


def create_app(gateway: Gateway) -> FastAPI:
    """The application. It starts and stops the gateway's router with its own lifespan."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.router.start()
        yield
        await gateway.stop()
        await gateway.router.stop()

    async def models(_: Request) -> Response:
        return Response(openai_chat.models(MODEL), media_type="application/json")

    async def healthz(_: Request) -> Response:
        return Response(orjson.dumps(gateway.status()), media_type="application/json")

    async def unknown(request: Request, _: Exception) -> Response:
        fault = UnknownPath(f"{request.method} {request.url.path}")
        return Response(openai_chat.error(fault), fault.status, media_type="application/json")

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.add_exception_handler(404, unknown)
    app.add_exception_handler(405, unknown)
    for path in openai_chat.PATHS:
        app.router.routes.append(Route(path, ChatCompletions(gateway), methods=["POST"]))
    app.add_route("/v1/models", models, methods=["GET"])
    app.add_route("/healthz", healthz, methods=["GET"])
    return app


class ChatCompletions:
    """ASGI endpoint of POST /v1/chat/completions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._limits = gateway.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get("state", {}).get("connection") or Connection()
        try:
            secret = auth.api_key(scope["headers"])
            request = openai_chat.parse(await self._body(scope, receive))
            attempt = await self._gateway.call(secret, request, "root", connection)
        except ClientGone:
            return
        except GatewayError as fault:
            await _refuse(send, fault)
            return
        attempt.waiting += 1
        gone = asyncio.get_running_loop().create_task(_disconnected(receive))
        try:
            delivered = await (self._stream if request.stream else self._answer)(request, attempt, gone, send)
        finally:
            gone.cancel()
            attempt.waiting -= 1
            self._gateway.left(attempt)
        if delivered:
            attempt.deliveries += 1
        else:
            attempt.connections.discard(connection)  # it may be kept alive, but it got nothing

    async def _answer(self, request: ModelRequest, attempt: Attempt, gone: asyncio.Task[None], send: Send) -> bool:
        """Wait and answer; returns whether the turn was delivered."""
        await _either(attempt.turn, gone, self._limits.answer_s)
        if gone.done():
            return False
        if not attempt.turn.done():  # the call goes on; the same request finds it again
            await _refuse(send, NoCell("the call is held, please ask again"))
            return False
        try:
            turn = attempt.turn.result()
        except GatewayError as fault:
            await _refuse(send, fault)
            return False
        await _respond(send, 200, openai_chat.response(request, turn))
        return True

    async def _stream(self, request: ModelRequest, attempt: Attempt, gone: asyncio.Task[None], send: Send) -> bool:
        """Wait, with pings, and send the finished turn as a stream; returns whether it was delivered.

        The stream opens with the first ping, so that what fails before has its true status.
        """
        opened = False
        while not attempt.turn.done() and not gone.done():
            await _either(attempt.turn, gone, self._limits.ping_s)
            if attempt.turn.done() or gone.done():
                break
            if not opened:
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
                opened = True
            await send({"type": "http.response.body", "body": openai_chat.PING, "more_body": True})
        if gone.done():
            return False
        try:
            body, delivered = openai_chat.stream(request, attempt.turn.result()), True
        except GatewayError as fault:
            if not opened:
                await _refuse(send, fault)
                return False
            body, delivered = openai_chat.error_event(fault), False
        if not opened:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        await send({"type": "http.response.body", "body": body})
        return delivered

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The request body. Raises BodyTooLarge before reading more than is allowed, and ClientGone."""
        limit = self._limits.body_bytes
        too_large = BodyTooLarge(f"the body is larger than {limit} bytes")
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
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


async def _refuse(send: Send, fault: GatewayError) -> None:
    headers = [(b"retry-after", str(fault.retry_after).encode())] if isinstance(fault, Unavailable) else []
    await _respond(send, fault.status, openai_chat.error(fault), headers)


async def _respond(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})
