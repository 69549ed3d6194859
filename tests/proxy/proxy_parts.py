"""Parts of proxy tests: the partial stack with scripted cells, a tiny tokenizer, a harness's side of a conversation."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from redis.asyncio import Redis

from infra.chat.qwen3 import Qwen3Renderer
from proxy.limits import Limits
from trajectory.records import CallRecord
from workers.harness_check.engine import Script, ScriptedEngine, ScriptedTurn
from workers.stack import partial
from workers.stack.partial import PartialStack, ServedGateway

SPECIAL = partial.SPECIAL_TOKENS
SPECIAL_IDS = set(range(len(SPECIAL)))
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
WAIT_S = 20.0
QUICK = Limits(
    answer_s=20, hold_s=30, ping_s=0.2, abandon_s=5, revoke_s=2, suspect_s=0.2, refresh_s=0.1, lease_s=1.0, redis_s=5
)


def write_tokenizer(path: Path) -> Path:
    texts = ["user assistant system tool bash command cat fox.txt name arguments", "the quick brown fox jumps"] * 20
    return partial.write_tokenizer(path, texts, vocabulary=400)


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


class ProxyStack(PartialStack):
    """Scripted cells that share what the policy says next, and gateways that are quick to give up."""

    def __init__(self, redis: Redis, renderer: Qwen3Renderer) -> None:
        super().__init__(redis, "")
        self.renderer = renderer
        self.script = Script(self._say)
        self.replies: list[str | list[int]] = []
        """What the policy says next: token ids, or text in which special tokens are spelled out."""
        self._said = 0

    def _say(self, prompt: list[int]) -> ScriptedTurn:
        reply = self.replies.pop(0) if self.replies else f"done {self._said}<|im_end|>"
        self._said += 1
        if isinstance(reply, str):
            reply = self.renderer.tokenizer.encode(reply, add_special_tokens=False).ids
        return ScriptedTurn(reply)

    async def open(self, cell: str, *, is_open: bool = True, **values: Any) -> ScriptedEngine:
        """Set the cell's route, and wait until every gateway has seen it."""
        engine = self.engines.setdefault(cell, ScriptedEngine(self.script))
        route = await self.set_route(cell, open=is_open, **{"epoch": 1, **values})
        for served in self.gateways:
            await until(lambda s=served: s.gateway.router.routes.get(cell) == route, "route seen")
        return engine

    async def close(self, cell: str, *, epoch: int = 2, version: int = 0) -> None:
        await self.open(cell, version=version, epoch=epoch, is_open=False)

    async def proxy(self, limits: Limits = QUICK) -> ServedGateway:
        return await self.start_gateway(self.renderer, limits)

    async def key(self, episode: str = "ep", secret: str = "", **values: Any) -> str:
        limits = {"max_new_tokens": 64, "context_limit": 100_000, "max_calls": 1000}
        return await self.add_key(episode, secret, **{**limits, **values})

    async def records(self, episode: str = "ep") -> list[CallRecord]:
        return await super().records(episode)


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
