"""`bench migration`: what becomes of a prefix's KV when its call moves to another cell. Everything in it is real.

Episodes with long prefixes are in the middle of a turn when their cell is drained. What the proxy's own records say of
the moved prefixes is held against limits: at the same weights they come from the store, at other weights nothing does.
Log-probs of everything that was sampled are held against a forward pass of transformers over the whole sequence, which
has never heard of a cache.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from infra.kv_store.arrival import Arrival
from infra.kv_store.pages import cache_salt, namespace, read_config
from infra.sglang.client import EngineClient
from infra.sglang.generation import GenerateRequest
from tests.bench.cells import CONTEXT, BenchCells
from tests.processes import free_port, proxy_process
from trajectory.records import CallRecord
from workers.errors import UsageError
from workers.harness_check.verify import sequences
from workers.stack.partial import PartialStack, partial_stack

SHARE = 0.9
"""Of the moved prefixes' tokens that has to come from the store at equal weights."""
DIFFERENCE = 1e-5
"""Between a log-prob as it was recorded and as transformers computes it, at most."""
UNDER_WAY = 32
"""Tokens that each episode's turn has when its cell is drained."""
WAIT_S = 600.0
NOISE = 0.02
"""Relative size of the difference between the two versions' weights."""

FIRST, SECOND = "cell-0", "cell-1"


class MigrationBenchSizes(BaseModel):
    """What is measured. Sizes are tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    episodes: int = Field(default=6, ge=1, le=10)
    prefix: int = Field(default=5000, ge=1000, le=6000)
    """Of an episode's first prompt."""
    turn: int = Field(default=400, ge=4 * UNDER_WAY, le=1000)
    """Of the turn that is cut, at most."""
    repeats: int = Field(default=5, ge=1)
    """Behind each latency."""
    store_mb: int = Field(default=512, ge=64)


SMALL: dict[str, Any] = {"episodes": 2, "prefix": 2500, "turn": 300, "repeats": 3, "store_mb": 128}


async def measure(sizes: MigrationBenchSizes, policy: Path) -> dict[str, Any]:
    """Run it all; the result is JSON. Raises UsageError when a part doesn't start or a turn can't be cut."""
    machine = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    async with started(sizes, policy) as bench:
        result: dict[str, Any] = {
            "plan": sizes.model_dump(),
            "machine": machine,
            "in_a_turn": await bench.in_a_turn(),
            "between_turns": await bench.between_turns(),
            "latency": await bench.latency(),
            "at_other_weights": await bench.at_other_weights(),
            "log_probs": await bench.log_probs(),
        }
    result["holds"] = all(part["holds"] for part in result.values() if isinstance(part, dict) and "holds" in part)
    return result


@asynccontextmanager
async def started(sizes: MigrationBenchSizes, policy: Path) -> AsyncIterator[MigrationBench]:
    """Two cells, a store, the proxy. Raises UsageError when one doesn't start."""
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        folder = Path(name)
        async with (
            partial_stack(folder, free_port()) as stack,
            BenchCells(stack, folder, policy, [FIRST, SECOND], store_mb=sizes.store_mb) as cells,
            proxy_process(stack.redis_url, policy, folder / "proxy", settings=cells.settings) as proxy,
            aiohttp.ClientSession() as session,
        ):
            yield MigrationBench(sizes, policy, stack, cells, session=session, url=proxy.url)


class MovedEpisode:
    """A harness's side of one episode."""

    def __init__(self, bench: MigrationBench, name: str) -> None:
        self._bench, self.name = bench, name
        self._messages: list[dict[str, str]] = []

    async def turn(self, text: str, most: int) -> None:
        """Raises UsageError when the proxy refuses."""
        self._messages.append({"role": "user", "content": text})
        body = {"model": "gyre-policy", "messages": self._messages, "max_tokens": most}
        headers = {"authorization": f"Bearer key-{self.name}"}
        url = f"{self._bench.url}/v1/chat/completions"
        async with self._bench.session.post(url, json=body, headers=headers) as response:
            answer = await response.json()
            if response.status != 200:
                raise UsageError(f"HTTP {response.status}: {answer}")
        message = answer["choices"][0]["message"]
        self._messages.append({name: value for name, value in message.items() if value is not None})


class MigrationBench:
    """What is measured, in this order: both cells serve version 0 until `at_other_weights` updates the second."""

    def __init__(
        self,
        sizes: MigrationBenchSizes,
        policy: Path,
        stack: PartialStack,
        cells: BenchCells,
        *,
        session: aiohttp.ClientSession,
        url: str,
    ) -> None:
        self.sizes, self.session, self.url = sizes, session, url
        self.cells = cells
        self._policy, self._stack = policy, stack
        self._tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))
        self._random = random.Random(0)
        self._models = {0: Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.float64).eval()}
        self._names: list[str] = []
        self._talks: list[MovedEpisode] = []

    async def in_a_turn(self) -> dict[str, Any]:
        """Episodes are cut in their first turn, which goes on at the second cell."""
        await self.cells.serve(FIRST)
        self._talks = [await self.talk(f"moved-{number}") for number in range(self.sizes.episodes)]
        return moving(await self.cut(self._talks, version=0), at_least=SHARE)

    async def between_turns(self) -> dict[str, Any]:
        """The same episodes have their second turn at the first cell, which has forgotten them."""
        await self.cells.engines[FIRST].abort_all()  # drops its KV
        await self.cells.serve(FIRST)
        await self.cells.drain(SECOND)
        await asyncio.gather(*(talk.turn(self.text(100), 16) for talk in self._talks))
        return moving([(await self._stack.records(talk.name))[1] for talk in self._talks], at_least=SHARE)

    async def at_other_weights(self) -> dict[str, Any]:
        """New episodes are cut in their first turn, which goes on at the second cell under version 1."""
        await self.update(SECOND)
        talks = [await self.talk(f"updated-{number}") for number in range(self.sizes.episodes)]
        return moving(await self.cut(talks, version=1), at_most=0)

    async def talk(self, name: str, temperature: float = 1.0) -> MovedEpisode:
        most = self.sizes.turn
        await self._stack.add_key(name, temperature=temperature, max_new_tokens=most, context_limit=CONTEXT)
        self._names.append(name)
        return MovedEpisode(self, name)

    def text(self, tokens: int) -> str:
        """Words that nobody said before, of about so many tokens."""
        words: list[str] = []
        while len(self._tokenizer.encode(" ".join(words)).ids) < tokens:
            letters = "abcdefghijklmnopqrstuvwxyz"
            words += ["".join(self._random.choices(letters, k=self._random.randint(2, 7))) for _ in range(20)]
        return " ".join(words)

    async def under_way(self, cell: str, calls: int, tokens: int) -> None:
        """Return when so many calls are being sampled on a cell. Raises UsageError when they aren't in time."""
        deadline = time.monotonic() + WAIT_S
        while True:
            loads = await self.cells.engines[cell].loads()
            if loads.running == calls and not loads.waiting and loads.used_tokens >= tokens:
                return
            if time.monotonic() > deadline:
                raise UsageError(f"the turns on {cell} did not begin within {WAIT_S:.0f} s: {loads}")
            await asyncio.sleep(0.01)

    async def cut(
        self, talks: list[MovedEpisode], *, version: int, before: Callable[[], None] = lambda: None
    ) -> list[CallRecord]:
        """First turns that begin at the first cell and end at the second, which serves ``version``; their records.

        ``before`` is called when they are under way.
        """
        sizes = self.sizes
        texts = [self.text(sizes.prefix) for _ in talks]
        turns = asyncio.gather(*(talk.turn(text, sizes.turn) for talk, text in zip(talks, texts, strict=True)))
        await self.under_way(FIRST, len(talks), len(talks) * (sizes.prefix + UNDER_WAY))
        before()
        await self.cells.serve(SECOND, version)
        await self.cells.drain(FIRST)
        await turns
        records = [(await self._stack.records(talk.name))[0] for talk in talks]
        if any(record.cells != [FIRST, SECOND] for record in records):
            raise UsageError(f"turns were over before they could move: {[record.cells for record in records]}")
        return records

    async def latency(self) -> dict[str, Any]:
        """Seconds to one token after a long prompt: that another cell has computed, and that nobody has."""
        seconds: dict[str, list[float]] = {"from_store": [], "computed": []}
        assert self.cells.store is not None
        arrival = Arrival(self.cells.store.http, namespace(read_config(self._policy)))
        computed_by, asked = self.cells.engines[FIRST], self.cells.engines[SECOND]
        for number in range(self.sizes.repeats):
            known, new = self._prompt(), self._prompt()
            await self._one_token(computed_by, known, f"known-{number}")
            await arrival.wait(known, cache_salt(0, ""), WAIT_S)
            for name, prompt in (("from_store", known), ("computed", new)):
                seconds[name].append(await self._one_token(asked, prompt, f"{name}-{number}"))
        await arrival.close()
        return {f"{name}_s": statistics.median(taken) for name, taken in seconds.items()} | {
            "tokens": self.sizes.prefix
        }

    def _prompt(self) -> list[int]:
        return self._random.choices(range(3, self._tokenizer.get_vocab_size()), k=self.sizes.prefix)

    async def _one_token(self, engine: EngineClient, prompt: list[int], rid: str) -> float:
        began = time.perf_counter()
        await engine.generate(
            GenerateRequest(input_ids=prompt, rid=rid, max_new_tokens=1, temperature=0, version=0, deadline_s=WAIT_S)
        )
        return time.perf_counter() - began

    async def update(self, cell: str) -> None:
        """Give an engine version 1: the policy's weights, slightly changed, always in the same way."""
        weights = load_file(self._policy / "model.safetensors")
        torch.manual_seed(1)
        changed = {name: value + NOISE * value.std() * torch.randn_like(value) for name, value in weights.items()}
        await self.cells.engines[cell].update_weights(changed, 1)
        model = Qwen3ForCausalLM.from_pretrained(self._policy, dtype=torch.float64).eval()
        model.load_state_dict(changed, strict=False)
        self._models[1] = model

    async def log_probs(self) -> dict[str, Any]:
        """Of every sampled token of every episode, against its version's forward pass over the whole sequence."""
        differences: list[float] = []
        for name in self._names:
            records = await self._stack.records(name)
            for record, sequence in zip(records, sequences(records), strict=True):
                differences += await asyncio.to_thread(self._differences, sequence, record)
        worst = max(differences)
        return {"tokens": len(differences), "max_difference": worst, "limit": DIFFERENCE, "holds": worst <= DIFFERENCE}

    def _differences(self, tokens: list[int], record: CallRecord) -> list[float]:
        count = len(record.output_ids)
        differences: list[float] = []
        for version in np.unique(record.versions):
            with torch.no_grad():
                logits = self._models[int(version)](torch.tensor([tokens])).logits[0, -count - 1 : -1]
            scored = torch.log_softmax(logits / record.temperature, dim=-1)
            expected = scored[torch.arange(count), torch.tensor(record.output_ids.tolist())].numpy()
            differences += np.abs(expected - record.logprobs)[record.versions == version].tolist()
        return differences


def moving(records: list[CallRecord], *, at_least: float = 0.0, at_most: float = 1.0) -> dict[str, Any]:
    """What records say of the prefixes that moved."""
    tokens = sum(record.moved_tokens for record in records)
    from_store = sum(record.moved_from_store for record in records)
    share = from_store / tokens if tokens else 0.0
    return {
        "calls": len(records),
        "moved_tokens": tokens,
        "from_store": from_store,
        "recomputed": sum(record.moved_recomputed for record in records),
        "bytes": sum(record.moved_bytes for record in records),
        "held_s": statistics.median(record.held_s for record in records),
        "share": share,
        "limit": at_least or at_most,
        "holds": bool(tokens) and at_least <= share <= at_most,
    }


def print_bench(result: Mapping[str, Any], console: Console) -> None:
    table = Table("", "calls", "moved tokens", "from the store", "computed again", "MB", "share", "limit", "", box=None)
    for name in ("in_a_turn", "between_turns", "at_other_weights"):
        part = result[name]
        counts = [str(part[key]) for key in ("calls", "moved_tokens", "from_store", "recomputed")]
        limit = f"{'at most' if name == 'at_other_weights' else 'at least'} {part['limit']:g}"
        holds = "[green]holds[/]" if part["holds"] else "[red]does not hold[/]"
        table.add_row(name, *counts, f"{part['bytes'] / 1e6:.1f}", f"{part['share']:.3f}", limit, holds)
    console.print(table)
    scored, latency = result["log_probs"], result["latency"]
    console.print(
        f"log-probs of {scored['tokens']} tokens differ from transformers' by {scored['max_difference']:.1e} at most "
        f"(limit {scored['limit']:.0e})"
    )
    console.print(
        f"one token after {latency['tokens']} of a prompt: {latency['from_store_s']:.3f} s from the store, "
        f"{latency['computed_s']:.3f} s computed"
    )
