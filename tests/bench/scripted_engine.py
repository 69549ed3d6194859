"""A stand-in for an engine, for benchmarks: ``python -m tests.bench.scripted_engine``. No model, no tokens read.

It answers SGLang's ``/generate`` with one of a few turns, tokenised beforehand, so that what is measured is the proxy.
Its HTTP is the little that the proxy's engine client speaks. Prints ``{"port": N}`` when it listens. ``GET /spent``
tells, for each request id since the last time, the seconds from the last byte of the request to its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer

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
_RID = re.compile(rb'"rid":"([^"]+)"')
_STREAMED = re.compile(rb'"stream":true')


def turns(tokenizer: Tokenizer) -> list[list[int]]:
    """What the policy says: some thinking, a sentence, a tool call."""
    spoken = []
    for number, command in enumerate(COMMANDS):
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        text = f"<think>\n{THOUGHT * (1 + number % 2)}\n</think>\n\nLet me look at it."
        text += f"\n<tool_call>\n{call}\n</tool_call><|im_end|>"
        spoken.append(list(tokenizer.encode(text, add_special_tokens=False).ids))
    return spoken


def message(ids: list[int]) -> bytes:
    """The engine's answer for a turn."""
    meta = {
        "completion_tokens": len(ids),
        "output_token_logprobs": [[-0.25 - (i % 7) / 8, token, None] for i, token in enumerate(ids)],
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        "cached_tokens": 0,
    }
    return json.dumps({"output_ids": ids, "meta_info": meta}).encode()


class ScriptedEngine:
    """What all connections share."""

    def __init__(self, answers: list[bytes], delay_s: float) -> None:
        self.answers, self.delay_s = answers, delay_s
        self.spent: dict[str, float] = {}
        self.served = 0

    def next(self) -> bytes:
        self.served += 1
        return self.answers[self.served % len(self.answers)]


class _Connection(asyncio.BufferedProtocol):
    """One connection; a request's body is received into one buffer, never copied."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._buffer = bytearray(1 << 16)
        self._filled = 0
        self._length = -1
        """Of the whole request, once its head is known."""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._filled == len(self._buffer):
            self._buffer.extend(bytes(len(self._buffer)))
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._length < 0:
            end = self._buffer.find(b"\r\n\r\n", 0, self._filled)
            if end < 0:
                return
            size = re.search(rb"(?i)content-length: *(\d+)", self._buffer[:end])
            self._length = end + 4 + (int(size[1]) if size else 0)
            if self._length > len(self._buffer):  # a new one: the loop may still hold a view of the old
                self._buffer = self._buffer[: self._filled] + bytearray(self._length - self._filled)
        if self._filled >= self._length:
            arrived = time.perf_counter()
            head = bytes(self._buffer[:1000])
            ends = head + bytes(self._buffer[max(0, self._length - 600) : self._length])
            self._buffer = bytearray(1 << 16)
            self._filled, self._length = 0, -1
            self._answer(head, ends, arrived)

    def _answer(self, head: bytes, ends: bytes, arrived: float) -> None:
        """``ends``: the head and the first and last fields of the body; between them are the ids."""
        if head.startswith(b"GET /spent"):
            spent, self._engine.spent = self._engine.spent, {}
            self._send(json.dumps(spent).encode())
        elif head.startswith(b"POST /generate"):
            rid = _RID.search(ends)
            body = self._engine.next()
            if _STREAMED.search(ends):
                body = b"data: " + body + b"\n\ndata: [DONE]\n\n"
            name = rid[1].decode().removesuffix("$") if rid else ""
            asyncio.get_running_loop().call_later(self._engine.delay_s, self._spend, name, body, arrived)
        elif head.startswith(b"GET /v1/loads"):
            load = {"num_running_reqs": 1, "num_waiting_reqs": 0, "num_used_tokens": 1, "max_total_num_tokens": 1 << 30}
            self._send(json.dumps({"loads": [load]}).encode())
        else:
            self._send(b"{}")

    def _spend(self, rid: str, body: bytes, arrived: float) -> None:
        self._engine.spent[rid] = time.perf_counter() - arrived
        self._send(body)

    def _send(self, body: bytes) -> None:
        if not self._transport.is_closing():
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            self._transport.write(head + body)


async def serve(tokenizer: Path, delay_s: float) -> None:
    engine = ScriptedEngine([message(ids) for ids in turns(Tokenizer.from_file(str(tokenizer)))], delay_s)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(engine), "127.0.0.1", 0, backlog=1024)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # ends with the process that started it


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tokenizer", type=Path, required=True)
    options.add_argument("--delay", type=float, default=0.0, help="seconds that a turn takes")
    given = options.parse_args()
    asyncio.run(serve(given.tokenizer, given.delay))


if __name__ == "__main__":
    main()
