"""The HTTP server: listens on a port and a unix socket, and tells the application when a connection closes."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from proxy.calls.episodes import Connection

KEEP_ALIVE_S = 900
"""Idle connections are kept longer than harnesses think between two calls: a closed one looks like a lost one."""
BACKLOG = 2048
STOP_S = 3
"""On a clean stop, calls that are held get this long; their harnesses then ask the next proxy."""


class _Tracking(asyncio.Protocol):
    """Puts the ``Connection`` of a client into the state of each of its requests."""

    def __init__(self, **arguments: Any) -> None:
        self.connection = Connection()
        arguments["app_state"] = {**arguments["app_state"], "connection": self.connection}
        super().__init__(**arguments)

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.closed = True
        super().connection_lost(exc)


TrackedProtocol = cast(type[asyncio.Protocol], type("TrackedProtocol", (_Tracking, AutoHTTPProtocol), {}))


def make_server(app: FastAPI) -> uvicorn.Server:
    """A server of the application; run it with the sockets of ``listen``."""
    config = uvicorn.Config(
        app,
        http=TrackedProtocol,
        ws="none",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
    )
    return uvicorn.Server(config)


def listen(host: str, port: int, path: Path | None = None) -> list[socket.socket]:
    """Sockets of the port and of the unix socket, to which any user may connect. Raises OSError if they are taken."""
    tcp = socket.socket(socket.AF_INET)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    tcp.bind((host, port))
    tcp.listen(BACKLOG)  # from here on clients wait for the application to start instead of being refused
    if path is None:
        return [tcp]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")  # bound aside and renamed: there is always a live socket
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(part))
    unix.listen(BACKLOG)
    part.chmod(0o666)
    part.replace(path)
    return [tcp, unix]
