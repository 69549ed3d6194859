"""The part of a stack that lies between harnesses and cells, in this process: gateways, engines, and their Redis.

For checks of harnesses, benches and tests: no Temporal, no workers, no model. Everything in it is real but the engines,
which are whatever their owner puts there by the url of a route.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from redis.asyncio import Redis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from infra.chat.chatml import IM_END, IM_START, MARKS
from infra.chat.qwen3 import Qwen3Renderer
from infra.state import keys
from infra.state.redis import as_bytes, redis_client
from infra.state.routes import get_route, set_route
from proxy.app import create_app
from proxy.calls.gateway import Gateway
from proxy.limits import Limits
from proxy.routing.engine import Engine
from proxy.routing.router import Router
from proxy.server import listen, make_server
from trajectory.records import CallRecord, decode_chain
from workers.errors import UsageError
from workers.stack.valkey import Valkey

START_S = 20.0
SPECIAL_TOKENS = (IM_START, IM_END, *MARKS)


@dataclass(frozen=True)
class ServedGateway:
    gateway: Gateway
    url: str
    server: uvicorn.Server
    serving: asyncio.Task[None]

    async def stop(self) -> None:
        self.server.should_exit = True
        await self.serving


class PartialStack:
    def __init__(self, redis: Redis, redis_url: str) -> None:
        self.redis, self.redis_url = redis, redis_url
        self.engines: dict[str, Engine] = {}
        """By the url of their routes."""
        self.gateways: list[ServedGateway] = []

    async def start_gateway(
        self, renderer: Qwen3Renderer, limits: Limits | None = None, socket: Path | None = None
    ) -> ServedGateway:
        """Serve on a port, and on a unix socket where one is named. Raises UsageError."""
        limits = limits or Limits()
        router = Router(self.redis, f"proxy-{len(self.gateways)}", lambda route: self.engines[route.url], limits)
        gateway = Gateway(self.redis, renderer, router, limits)
        sockets = listen("127.0.0.1", 0, socket)
        server = make_server(create_app(gateway))
        serving = asyncio.create_task(server._serve(sockets))
        served = ServedGateway(gateway, f"http://127.0.0.1:{sockets[0].getsockname()[1]}", server, serving)
        self.gateways.append(served)
        async with asyncio.timeout(START_S):
            while not server.started:
                if serving.done():
                    raise UsageError("the gateway does not start") from serving.exception()
                await asyncio.sleep(0.01)
        return served

    async def stop(self) -> None:
        for served in self.gateways:
            await served.stop()

    async def set_route(self, cell: str, **values: Any) -> keys.Route:
        """Set the cell's route: open, at the url that is the cell's name, version 0, one epoch on, or as ``values``."""
        before = await get_route(self.redis, cell)
        fields = {"url": cell, "incarnation": "i0", "epoch": before.epoch + 1 if before else 1, "open": True}
        route = keys.Route.model_validate({"cell": cell, "version": 0, **fields, **values})
        await set_route(self.redis, route)
        return route

    async def add_key(self, episode: str, api_key: str = "", **values: Any) -> str:
        """An API key of an episode that has hardly any limits but those in ``values``."""
        limits = {"max_new_tokens": 4096, "context_limit": 4_000_000, "max_calls": 1_000_000}
        fields = {"generation": 0, "min_version": 0, "max_version": 9, "temperature": 1.0, **limits}
        stands_for = keys.EpisodeKey.model_validate({"episode": episode, **fields, **values})
        api_key = api_key or f"key-{episode}"
        await self.redis.set(keys.key(api_key), stands_for.model_dump_json())
        return api_key

    async def records(self, episode: str) -> list[CallRecord]:
        return decode_chain(map(as_bytes, await self.redis.lrange(keys.calls(episode), 0, -1)))


@asynccontextmanager
async def partial_stack(folder: Path, port: int | None = None) -> AsyncIterator[PartialStack]:
    """With a Valkey of its own, whose data is in ``folder`` (``Valkey``). Raises UsageError."""
    with Valkey(folder, port) as valkey:
        async with aclosing(redis_client(valkey.url)) as redis:
            stack = PartialStack(redis, valkey.url)
            try:
                yield stack
            finally:
                await stack.stop()


def write_tokenizer(path: Path, texts: Iterable[str], vocabulary: int) -> Path:
    """A byte-level BPE with ChatML's special tokens, trained on the spot."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return path
