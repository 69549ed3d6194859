"""Real parts for proxy tests: a Valkey, a tiny tokenizer, proxies over loopback HTTP, and a scripted engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from redis.asyncio import Redis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from infra.chat.qwen3 import ChatMLRenderer
from infra.sglang.errors import EngineError, EngineLost
from infra.sglang.generation import GenerateRequest, Generation
from infra.state import keys
from proxy.app import create_app
from proxy.calls.gateway import Gateway
from proxy.limits import Limits
from proxy.routing.router import Router
from proxy.server import listen, make_server
from trajectory.records import CallRecord, decode_chain

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
SPECIAL_IDS = set(range(len(SPECIAL)))
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
WAIT_S = 20.0
QUICK = Limits(
    answer_s=20, hold_s=30, ping_s=0.2, abandon_s=5, revoke_s=2, suspect_s=0.2, refresh_s=0.1, lease_s=1.0, redis_s=5
)


def write_tokenizer(path: Path) -> Path:
    """Train a byte-level BPE with the renderer's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    text = ["user assistant system tool bash command cat fox.txt name arguments", "the quick brown fox jumps"] * 20
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.save(str(path))
    return path


async def until(condition: Callable[[], Any] | Callable[[], Awaitable[Any]], what: str) -> Any:
    """Wait for a condition; fails by name after WAIT_S seconds."""
    deadline = time.monotonic() + WAIT_S
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.01)


@dataclass
class Seen:
    """One request as an engine saw it, and what it gave."""

    input_ids: list[int]
    rid: str
    version: int
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)


class ScriptedEngine:
    """Test double of an engine: answers with scripted token ids, one by one, and can be held or killed.

    ``say`` gets the prompt and returns the whole turn's ids; a request that continues a partial turn gets the rest,
    since the engine looks for the partial at the end of its prompt (``partials``).
    """

    def __init__(self, name: str, say: Callable[[list[int]], list[int]], shared: dict[str, Any]) -> None:
        self.name, self.say, self.shared = name, say, shared
        self.seen: list[Seen] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.stop_after: int | None = None
        """Sample so many tokens, then wait for the gate, an abort or death."""
        self.deaf = False
        """Ignores aborts."""
        self.dead = False
        self._ends: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        input_ids, rid, version = list(request.input_ids), request.rid, request.version
        call, turn = rid.rsplit(".", 1)[0], self.shared["turns"]
        if call not in turn:
            turn[call] = self.say(input_ids)
            self.shared["prompts"][call] = len(input_ids)
        done = len(input_ids) - self.shared["prompts"][call]
        seen = Seen(input_ids, rid, version, request.max_new_tokens)
        self.seen.append(seen)
        end = self._ends[rid] = asyncio.Event()
        rest = turn[call][done : done + request.max_new_tokens]
        if self.stop_after is not None:
            seen.output_ids = rest[: self.stop_after]
            if request.on_tokens is not None:
                request.on_tokens(seen.output_ids, [-0.5] * len(seen.output_ids))
        if not self.gate.is_set():
            gate, ended = asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(end.wait())
            try:
                await asyncio.wait({gate, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gate.cancel()
                ended.cancel()
        got = seen.output_ids
        if self.dead:
            raise EngineLost("killed", got, [-0.5] * len(got), [version] * len(got))
        finish: Any = "abort"
        if not end.is_set():
            got = seen.output_ids = rest
            finish = "stop" if got and got[-1] in request.stop_token_ids else "length"
        return Generation(list(got), [-0.5] * len(got), [version] * len(got), finish, 7)

    async def abort(self, rid: str, deadline_s: float = 1.0) -> None:
        if self.deaf:
            await asyncio.sleep(deadline_s)
            raise EngineError("deaf")
        if rid in self._ends:
            self._ends[rid].set()

    def die(self) -> None:
        self.dead = True
        self.gate.set()

    async def close(self) -> None:
        return None


@dataclass
class Proxy:
    gateway: Gateway
    url: str
    server: uvicorn.Server
    task: asyncio.Task[None]

    async def stop(self) -> None:
        self.server.should_exit = True
        await self.task


@dataclass
class World:
    """One Redis, some scripted cells, some proxies."""

    redis: Redis
    renderer: ChatMLRenderer
    engines: dict[str, ScriptedEngine] = field(default_factory=dict)
    proxies: list[Proxy] = field(default_factory=list)
    shared: dict[str, Any] = field(default_factory=lambda: {"turns": {}, "prompts": {}})
    replies: list[str | list[int]] = field(default_factory=list)
    """What the policy says next: token ids, or text in which special tokens are spelled out."""

    def say(self, prompt: list[int]) -> list[int]:
        text = self.replies.pop(0) if self.replies else f"done {len(self.shared['turns'])}<|im_end|>"
        return text if isinstance(text, list) else self.renderer.tokenizer.encode(text, add_special_tokens=False).ids

    async def open(
        self, cell: str, *, version: int = 0, epoch: int = 1, incarnation: str = "i0", is_open: bool = True
    ) -> ScriptedEngine:
        engine = self.engines.setdefault(cell, ScriptedEngine(cell, self.say, self.shared))
        route = keys.Route(cell=cell, url=cell, incarnation=incarnation, epoch=epoch, open=is_open, version=version)
        await self.redis.hset(keys.ROUTES, cell, route.model_dump_json())
        await self.redis.publish(keys.ROUTES_CHANGED, cell)
        for proxy in self.proxies:
            await until(lambda p=proxy: p.gateway.router.routes.get(cell) == route, "route seen")
        return engine

    async def close(self, cell: str, *, epoch: int = 2, version: int = 0) -> None:
        await self.open(cell, version=version, epoch=epoch, is_open=False)

    async def proxy(self, limits: Limits = QUICK) -> Proxy:
        number = len(self.proxies)
        router = Router(self.redis, f"proxy-{number}", lambda route: self.engines[route.url], limits)
        gateway = Gateway(self.redis, self.renderer, router, limits)
        sockets = listen("127.0.0.1", 0)
        server = make_server(create_app(gateway))
        task = asyncio.create_task(server._serve(sockets))
        await until(lambda: server.started, "proxy started")
        proxy = Proxy(gateway, f"http://127.0.0.1:{sockets[0].getsockname()[1]}", server, task)
        self.proxies.append(proxy)
        return proxy

    async def key(self, episode: str = "ep", secret: str = "", **changes: Any) -> str:
        values: dict[str, Any] = {
            "episode": episode,
            "generation": 0,
            "min_version": 0,
            "max_version": 9,
            "temperature": 1.0,
            "max_new_tokens": 64,
            "context_limit": 100_000,
            "max_calls": 1000,
        }
        secret = secret or f"key-{episode}"
        await self.redis.set(keys.key(secret), keys.EpisodeKey(**(values | changes)).model_dump_json())
        return secret

    async def records(self, episode: str = "ep") -> list[CallRecord]:
        return decode_chain(await self.redis.lrange(keys.calls(episode), 0, -1))


def sequences(records: list[CallRecord]) -> list[list[int]]:
    """The full token sequence of each call, from the records alone."""
    full: list[list[int]] = []
    for record in records:
        kept = full[record.parent][: record.kept] if record.parent >= 0 else []
        full.append([*kept, *record.prompt_ids.tolist(), *record.output_ids.tolist()])
    return full


class Harness:
    """A harness's side of a conversation: one HTTP session and its messages."""

    def __init__(self, url: str, key: str, session: aiohttp.ClientSession) -> None:
        self.url, self.key, self.session = url, key, session
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = [BASH]

    async def post(self, **extra: Any) -> tuple[int, Any]:
        body = {"model": "m", "messages": self.messages, "tools": self.tools, **extra}
        headers = {"authorization": f"Bearer {self.key}"}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
            text = await response.text()
            return response.status, text if extra.get("stream") else json.loads(text)

    async def turn(self, **extra: Any) -> dict[str, Any]:
        """Ask for a turn and take it over; returns the assistant message."""
        status, body = await self.post(**extra)
        assert status == 200, body
        message: dict[str, Any] = body["choices"][0]["message"]
        self.messages.append(message)
        return message

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer(self, message: dict[str, Any], text: str) -> None:
        for call in message["tool_calls"]:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


def call_text(command: str) -> str:
    """A sampled turn that calls bash."""
    arguments = json.dumps({"command": command})
    return f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call><|im_end|>'
