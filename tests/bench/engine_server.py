"""The scripted engine behind HTTP, for benches: ``python -m tests.bench.engine_server``. No model.

It answers SGLang's ``/generate`` with one of a few turns, tokenised beforehand, and speaks the little HTTP that the
proxy's engine client does. Prints ``{"port": N}`` when it listens. ``GET /spent`` tells, for each request id since the
last time, the seconds from the last byte of the request to its answer, so that what is measured is the proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import orjson
from tokenizers import Tokenizer

from infra.sglang.generation import RID_END, GenerateRequest, Generation
from workers.harness_check.engine import Script, ScriptedEngine, ScriptedTurn

COMMANDS = (
    "sed -n '1,120p' src/service/handlers.py",
    "python -m pytest -x -q tests/test_handlers.py 2>&1 | tail -60",
    "grep -rn 'def resolve' src --include='*.py' | head -40",
    "git diff --stat && git log --oneline | head -5",
    "cat -n src/service/registry.py",
)
THOUGHT = (
    "The failure comes from the registry: the handler is looked up before it was registered, so the lookup returns "
    "nothing and the caller dereferences it. I want to see how the module is initialised, then decide where the "
    "registration belongs; the tests show the order in which both are imported. "
)
LOADS = {"num_running_reqs": 1, "num_waiting_reqs": 0, "num_used_tokens": 1, "max_total_num_tokens": 1 << 30}
DEADLINE_S = 3600.0


def turns(tokenizer: Tokenizer) -> list[list[int]]:
    """What the policy says: some thinking, a sentence, a tool call."""
    spoken = []
    for number, command in enumerate(COMMANDS):
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        text = f"<think>\n{THOUGHT * (1 + number % 2)}\n</think>\n\nLet me look at it."
        text += f"\n<tool_call>\n{call}\n</tool_call><|im_end|>"
        spoken.append(list(tokenizer.encode(text, add_special_tokens=False).ids))
    return spoken


def message(generation: Generation) -> bytes:
    """A generation as SGLang says it, in one message."""
    ids = generation.output_ids
    meta = {
        "completion_tokens": len(ids),
        "output_token_logprobs": [[value, token, None] for value, token in zip(generation.logprobs, ids, strict=True)],
        "finish_reason": {"type": generation.finish, "matched": ids[-1]},
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        "cached_tokens": 0,
    }
    return orjson.dumps({"output_ids": ids, "meta_info": meta})


class _Connection(asyncio.BufferedProtocol):
    """One connection; a request's body is received into one buffer, never copied."""

    def __init__(self, engine: ScriptedEngine, delay_s: float, spent: dict[str, float]) -> None:
        self._engine, self._delay_s, self._spent = engine, delay_s, spent
        self._buffer = bytearray(1 << 16)
        self._filled = 0
        self._body = 0
        """Where the body begins, once the head is there."""
        self._length = 0
        """Of the whole request."""
        self._transport: asyncio.Transport
        self._answering: asyncio.Task[None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._filled == len(self._buffer):
            self._buffer.extend(bytes(len(self._buffer)))
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if not self._body:
            end = self._buffer.find(b"\r\n\r\n", 0, self._filled)
            if end < 0:
                return
            size = re.search(rb"(?i)content-length: *(\d+)", self._buffer[:end])
            self._body = end + 4
            self._length = self._body + (int(size[1]) if size else 0)
            if self._length > len(self._buffer):  # a new one: the loop may still hold a view of the old
                self._buffer = self._buffer[: self._filled] + bytearray(self._length - self._filled)
        if self._filled >= self._length:
            arrived, request = time.perf_counter(), self._buffer
            head, body = bytes(request[: self._body]), memoryview(request)[self._body : self._length]
            self._buffer = bytearray(1 << 16)
            self._filled = self._body = 0
            self._answering = asyncio.create_task(self._answer(head, body, arrived))

    async def _answer(self, head: bytes, body: memoryview, arrived: float) -> None:
        if head.startswith(b"GET /spent"):
            spent = dict(self._spent)
            self._spent.clear()
            self._send(orjson.dumps(spent))
        elif head.startswith(b"POST /generate"):
            await self._generate(orjson.loads(body), arrived)
        elif head.startswith(b"GET /v1/loads"):
            self._send(orjson.dumps({"loads": [LOADS]}))
        else:
            self._send(b"{}")

    async def _generate(self, asked: dict[str, Any], arrived: float) -> None:
        rid, sampling = asked["rid"].removesuffix(RID_END), asked["sampling_params"]
        request = GenerateRequest(
            input_ids=asked["input_ids"],
            rid=rid,
            max_new_tokens=sampling["max_new_tokens"],
            temperature=sampling["temperature"],
            stop_token_ids=sampling["stop_token_ids"],
            version=0,
            deadline_s=DEADLINE_S,
        )
        generation = await self._engine.generate(request)
        self._engine.seen.clear()  # a million ids each
        answer = message(generation)
        if asked["stream"]:
            answer = b"data: " + answer + b"\n\ndata: [DONE]\n\n"
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        self._spent[rid] = time.perf_counter() - arrived
        self._send(answer)

    def _send(self, body: bytes) -> None:
        if not self._transport.is_closing():
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            self._transport.write(head + body)


async def serve(tokenizer: Path, delay_s: float) -> None:
    spoken = cycle(ScriptedTurn(ids) for ids in turns(Tokenizer.from_file(str(tokenizer))))
    engine = ScriptedEngine(Script(lambda prompt: next(spoken)))
    spent: dict[str, float] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(engine, delay_s, spent), "127.0.0.1", 0, backlog=1024)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)  # ends with the process that started it


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tokenizer", type=Path, required=True)
    options.add_argument("--delay", type=float, default=0.0, help="seconds that a turn takes")
    given = options.parse_args()
    asyncio.run(serve(given.tokenizer, given.delay))


if __name__ == "__main__":
    main()
