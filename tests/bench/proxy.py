"""`bench proxy`: what the proxy costs, against tokenising again what it already knows, in one run.

Every figure that has a limit is a ratio to something measured in the same run, a latency without the engine, or a
count. The parts are real (proxy processes, Valkey, HTTP over loopback) but the engine, which is scripted.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from infra.state import keys
from tests.bench.conversation import DIALECTS, Conversation
from tests.bench.processes import BlockingHarness, engine_server
from tests.bench.texts import ToolOutputs, tokenizer_file
from tests.processes import ProxyProcess, free_port, proxy_process
from workers.errors import UsageError
from workers.stack.partial import PartialStack, partial_stack

FULL_TOKENS = 700_000
"""The size for which the limits are stated. A smaller run has what a call costs whatever its size against less history:
its limits follow from its size, so that a reduced run still tells when something got worse."""
CPU_RATIO = 1 / 20
SHORT_MS, LONG_MS = 3.0, 60.0
BYTES_PER_TOKEN, BYTES_MORE = 16, 50_000_000
SHORT_TOKENS = 8000
CHARACTERS_PER_TOKEN = 2.6
PATIENCE_S = 60.0
"""How long a harness goes on asking a proxy that has died."""


class ProxyBenchSizes(BaseModel):
    """What is measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: int = Field(default=300, ge=10)
    """Of the long episode."""
    tokens: int = Field(default=FULL_TOKENS, ge=20_000)
    """To which the long episode grows."""
    episodes: int = Field(default=256, ge=2)
    """That run at once."""
    episode_turns: int = Field(default=8, ge=2)
    samples: int = Field(default=10, ge=2)
    """Turns of the long episode whose history is tokenised again; what lies between is interpolated."""
    repeats: int = Field(default=30, ge=5)
    """Calls behind each median latency, and a quarter as many episodes that a killed process leaves."""
    dialect: str = "openai_chat"


CACHE = Path(".cache/bench")
"""Where the benchmark's tokenizer is kept."""
SMALL: dict[str, Any] = {"turns": 40, "tokens": 60_000, "episodes": 32, "episode_turns": 4, "samples": 4, "repeats": 12}


async def measure(sizes: ProxyBenchSizes, cache: Path) -> dict[str, Any]:
    """Run it all; the result is JSON. Raises UsageError when a part doesn't start."""
    if sizes.dialect not in DIALECTS:
        raise UsageError(f"no dialect {sizes.dialect!r}: there are {', '.join(DIALECTS)}")
    tokenizer = await asyncio.to_thread(tokenizer_file, cache)
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        folder = Path(name)
        async with partial_stack(folder, free_port()) as stack, AsyncExitStack() as processes:
            bench = ProxyBench(sizes, stack, tokenizer, folder, processes)
            machine = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
            result = {"plan": sizes.model_dump(), "machine": machine, **await bench.long_episode()}
            result["concurrent"] = await bench.concurrent()
            result["killed"] = await bench.killed()
    result["holds"] = all(part["holds"] for part in result.values() if isinstance(part, dict) and "holds" in part)
    return result


class ProxyBench:
    def __init__(
        self, sizes: ProxyBenchSizes, stack: PartialStack, tokenizer: Path, folder: Path, processes: AsyncExitStack
    ) -> None:
        """``processes`` end with it."""
        self._sizes, self._stack, self._tokenizer, self._folder = sizes, stack, tokenizer, folder
        self._processes = processes
        self._new = DIALECTS[sizes.dialect]
        self._port = 0

    async def _start_engine(self, cell: str, *, delay_s: float = 0.0) -> int:
        """Start a scripted engine as the one open cell; its port."""
        port = await self._processes.enter_async_context(engine_server(self._tokenizer, delay_s))
        await self._stack.redis.delete(keys.ROUTES)
        await self._stack.set_route(cell, url=f"http://127.0.0.1:{port}")
        return port

    async def _start_proxy(self, processes: int) -> ProxyProcess:
        home = self._folder / f"proxy-{processes}"
        starting = proxy_process(self._stack.redis_url, self._tokenizer.parent, home, processes=processes)
        return await self._processes.enter_async_context(starting)

    async def long_episode(self) -> dict[str, Any]:
        """One episode that grows: CPU, memory, and the latency at both ends of the context."""
        sizes = self._sizes
        engine = await self._start_engine("cell-0")
        proxy = await self._start_proxy(1)
        self._port, (process,) = proxy.port, proxy.serving()
        client = BlockingHarness(proxy.port, engine)
        talk = await self._conversation("tiny")
        await asyncio.to_thread(converse, client, talk, 3, 3 * 200)
        resident = process.memory_info().rss
        talk = await self._conversation("long")
        began = cpu_s(process)
        grown = await asyncio.to_thread(converse, client, talk, sizes.turns, sizes.tokens)
        spent_s = cpu_s(process) - began
        growth = process.memory_info().rss - resident
        unique = talk.prompt_tokens + talk.output_tokens
        baseline = await asyncio.to_thread(tokenised_again, self._tokenizer, talk, grown, sizes.samples)
        late = await asyncio.to_thread(converse, client, talk, sizes.repeats, 0)
        early: list[TimedCall] = []
        for number in range(-(-sizes.repeats // 5)):
            short = await self._conversation(f"short-{number}", SHORT_TOKENS - 1000)
            early += await asyncio.to_thread(converse, client, short, 5, 0)
        client.close()
        ratio_limit = CPU_RATIO * max(1.0, FULL_TOKENS / sizes.tokens)
        long_limit = SHORT_MS + (LONG_MS - SHORT_MS) * sizes.tokens / FULL_TOKENS
        memory_limit = BYTES_PER_TOKEN * unique + BYTES_MORE
        return {
            "cpu": {
                "proxy_s": spent_s,
                "tokenised_again_s": baseline["cpu_s"],
                "ratio": spent_s / baseline["cpu_s"],
                "limit": ratio_limit,
                "holds": spent_s <= ratio_limit * baseline["cpu_s"],
                "turns": sizes.turns,
                "tokens": unique,
                "tokenised_again": baseline["how"],
            },
            "latency_short": latency(early, SHORT_MS),
            "latency_long": latency(late, min(LONG_MS, long_limit)),
            "memory": {
                "growth_bytes": growth,
                "bytes_per_token": growth / unique,
                "limit_bytes": memory_limit,
                "limit": f"{BYTES_PER_TOKEN} bytes a token + {BYTES_MORE // 10**6} MB",
                "holds": growth <= memory_limit,
            },
        }

    async def concurrent(self) -> dict[str, Any]:
        """Many episodes at once on the one proxy process."""
        sizes, calls = self._sizes, list[TimedCall]()
        talks = [await self._conversation(f"many-{number}") for number in range(sizes.episodes)]
        outputs = ToolOutputs()
        errors: list[str] = []

        async def run(session: aiohttp.ClientSession, talk: Conversation) -> None:
            for _ in range(sizes.episode_turns):
                began = time.perf_counter()
                async with session.post(talk.path, data=talk.body(), headers=talk.headers) as response:
                    answer = await response.read()
                if response.status != 200:
                    errors.append(f"HTTP {response.status}: {answer[:200]!r}")
                    return
                calls.append(TimedCall(talk.prompt_tokens, time.perf_counter() - began))
                talk.take(answer)
                talk.answer(outputs.next(3000))

        began = time.perf_counter()
        async with _session(self._port) as session:
            await asyncio.gather(*(run(session, talk) for talk in talks))
        seconds = time.perf_counter() - began
        times = sorted(call.seconds * 1000 for call in calls) or [0.0]
        return {
            "episodes": sizes.episodes,
            "calls": len(calls),
            "errors": len(errors),
            "first_error": next(iter(errors), None),
            "calls_per_s": len(calls) / seconds,
            "p50_ms": statistics.median(times),
            "p99_ms": times[int(0.99 * (len(times) - 1))],
            "limit": 0,
            "holds": not errors and len(calls) == sizes.episodes * sizes.episode_turns,
        }

    async def killed(self) -> dict[str, Any]:
        """Two processes behind one address, one of them killed in the middle."""
        sizes = self._sizes
        await self._start_engine("cell-1", delay_s=0.05)
        proxy = await self._start_proxy(2)
        names = [f"kill-{number}" for number in range(max(4, sizes.repeats))]
        talks = [await self._conversation(name) for name in names]
        outputs = ToolOutputs()
        done = 0
        again = 0
        half = asyncio.Event()

        async def run(talk: Conversation) -> None:
            nonlocal done, again
            async with _session(proxy.port) as session:
                for _ in range(sizes.episode_turns):
                    answer, tries = await _patiently(session, talk)
                    talk.take(answer)
                    talk.answer(outputs.next(1500))
                    done += 1
                    again += tries
                    if done > len(talks) * sizes.episode_turns // 3:
                        half.set()

        async def kill() -> None:
            await half.wait()
            max(proxy.serving(), key=lambda process: len(process.net_connections("tcp"))).kill()

        finished = await asyncio.gather(kill(), *(run(talk) for talk in talks), return_exceptions=True)
        failed = [repr(fault) for fault in finished if isinstance(fault, BaseException)]
        wrong = []
        for name in names:
            parents = [record.parent for record in await self._stack.records(name)]
            if parents != list(range(-1, sizes.episode_turns - 1)):
                wrong.append(f"{name}: {parents}")
        return {
            "episodes": len(talks),
            "failed": len(failed),
            "first_failure": next(iter(failed), None),
            "asked_again": again,
            "forked_or_sampled_twice": len(wrong),
            "first_wrong": next(iter(wrong), None),
            "limit": 0,
            "holds": not failed and not wrong and again > 0,
        }

    async def _conversation(self, name: str, tokens: int = 0) -> Conversation:
        """A new episode's, with a task of about so many tokens."""
        task = f"({name}) The test suite fails since the last merge. Find out why and mend it.\n"
        task += ToolOutputs().next(int(tokens * CHARACTERS_PER_TOKEN))
        return self._new(await self._stack.add_key(name), task)


@dataclass(frozen=True)
class TimedCall:
    """One call of an episode."""

    prompt_tokens: int
    seconds: float
    """Beside the engine's."""
    messages: int = 0
    """Of the request."""


def cpu_s(process: psutil.Process) -> float:
    """User and system seconds of all threads so far (10 ms resolution)."""
    times = process.cpu_times()
    return float(times.user + times.system)


def converse(client: BlockingHarness, talk: Conversation, turns: int, tokens: int) -> list[TimedCall]:
    """So many turns, with tool outputs that bring the prompt to ``tokens`` tokens; of a word each when it is there."""
    calls = []
    outputs = ToolOutputs()
    per_token, written = CHARACTERS_PER_TOKEN, 0
    for turn in range(turns):
        body, messages = talk.body(), len(talk.texts)
        answer, seconds = client.post(talk.path, body, talk.headers)
        talk.take(answer)
        calls.append(TimedCall(talk.prompt_tokens, seconds, messages))
        if turn > 4 and written:
            per_token = written / (talk.prompt_tokens - calls[0].prompt_tokens - turn * talk.output_tokens)
        left = max(0, tokens - talk.prompt_tokens - talk.output_tokens) / max(1, turns - turn - 1)
        size = int((left - talk.output_tokens) * per_token)
        text = outputs.next(size) if size > 0 and turn + 1 < turns else "ok"
        written += len(text) + 30
        talk.answer(text)
    return calls


def tokenised_again(tokenizer: Path, talk: Conversation, calls: list[TimedCall], samples: int) -> dict[str, Any]:
    """CPU seconds of rendering and tokenising the history of each call anew, on one thread."""
    encoder = Tokenizer.from_file(str(tokenizer))
    places = sorted({round(place) for place in np.linspace(0, len(calls) - 1, samples)})
    spent, tokens = [], []
    for place in places:
        began = time.process_time()
        ids = encoder.encode("".join(talk.texts[: calls[place].messages]), add_special_tokens=False).ids
        spent.append(time.process_time() - began)
        tokens.append(len(ids))
    known = [calls[place].prompt_tokens for place in places]
    every = [call.prompt_tokens for call in calls]
    return {
        "cpu_s": float(np.interp(every, known, spent).sum()),
        "how": {
            "measured_turns": len(places),
            "of_turns": len(calls),
            "between": "interpolated linearly over the prompt's tokens",
            "tokens_of_last": tokens[-1],
            "prompt_tokens_of_last": known[-1],
        },
    }


def latency(calls: list[TimedCall], limit_ms: float) -> dict[str, Any]:
    times = sorted(call.seconds * 1000 for call in calls)
    p50 = statistics.median(times)
    return {
        "prompt_tokens": int(statistics.median(call.prompt_tokens for call in calls)),
        "calls": len(times),
        "p50_ms": p50,
        "p99_ms": times[int(0.99 * (len(times) - 1))],
        "limit": limit_ms,
        "holds": p50 <= limit_ms,
    }


def _session(port: int) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    return aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, timeout=timeout)


async def _patiently(session: aiohttp.ClientSession, talk: Conversation) -> tuple[bytes, int]:
    """The answer, and how often it had to be asked for again, as the providers' SDKs do."""
    deadline = time.monotonic() + PATIENCE_S
    tries = 0
    while True:
        try:
            async with session.post(talk.path, data=talk.body(), headers=talk.headers) as response:
                answer = await response.read()
                if response.status == 200:
                    return answer, tries
                if response.status < 500 or time.monotonic() > deadline:
                    raise RuntimeError(f"HTTP {response.status}: {answer[:200]!r}")
        except aiohttp.ClientError:
            if time.monotonic() > deadline:
                raise
        tries += 1
        await asyncio.sleep(min(2.0, 0.1 * 2**tries))


def print_bench(result: dict[str, Any], console: Console) -> None:
    """The figures that have a limit, as a table."""
    table = Table("what", "measured", "limit", "holds")
    cpu, memory, many, killed = (result[name] for name in ("cpu", "memory", "concurrent", "killed"))
    rows = [
        ("CPU, to tokenising again", f"{cpu['ratio']:.3f} ({cpu['proxy_s']:.1f} s)", f"{cpu['limit']:.3f}", cpu),
        *(
            (
                f"added latency at {part['prompt_tokens']} tokens",
                f"{part['p50_ms']:.1f} ms",
                f"{part['limit']} ms",
                part,
            )
            for part in (result["latency_short"], result["latency_long"])
        ),
        ("memory a token", f"{memory['bytes_per_token']:.1f} bytes", memory["limit"], memory),
        (
            f"{many['episodes']} episodes at once",
            f"{many['errors']} errors; {many['calls_per_s']:.0f} calls/s, p99 {many['p99_ms']:.0f} ms",
            "0 errors",
            many,
        ),
        (
            "one of two processes killed",
            f"{killed['failed']} failed, {killed['forked_or_sampled_twice']} forked",
            "0",
            killed,
        ),
    ]
    for what, measured, limit, part in rows:
        table.add_row(what, measured, limit, "[green]yes[/]" if part["holds"] else "[red]no[/]")
    console.print(table)
