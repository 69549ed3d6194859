"""Two real engines, a real store, the real proxy: a prefix moves with its call, and a dead store only costs time."""

from __future__ import annotations

import asyncio
import random

import pytest

from infra.sglang.client import EngineClient
from infra.sglang.generation import GenerateRequest
from tests.bench.migration import FIRST, SECOND, SMALL, MigrationBenchSizes, started
from workers.quickstart import prepare

pytestmark = pytest.mark.stack


async def release_while_writing(engine: EngineClient) -> None:
    """SGLang ends itself when memory is released while KV is on its way to the store."""
    prompt = random.Random(5).choices(range(5, 600), k=3000)
    await engine.generate(
        GenerateRequest(input_ids=prompt, rid="written", max_new_tokens=1, temperature=0, version=0, deadline_s=600)
    )
    await engine.release_memory()
    await engine.resume_memory()
    assert await engine.ready()


async def test_a_moved_prefix_comes_from_the_store_at_its_own_weights_and_is_computed_without_a_store() -> None:
    policy = await asyncio.to_thread(prepare, 0, print)
    plan = MigrationBenchSizes.model_validate(SMALL)
    async with started(plan, policy.absolute()) as bench:
        moved = await bench.in_a_turn()
        assert moved["holds"], moved
        assert moved["moved_tokens"] == moved["from_store"] + moved["recomputed"]
        assert moved["bytes"] == moved["from_store"] * 2048
        between = await bench.between_turns()
        assert between["holds"] and between["moved_tokens"] > moved["moved_tokens"], between
        updated = await bench.at_other_weights()
        assert updated["holds"] and updated["recomputed"] == updated["moved_tokens"] > 0, updated
        scored = await bench.log_probs()
        assert scored["holds"], scored

        await release_while_writing(bench.cells.engines[FIRST])
        await bench.update(FIRST)
        await bench.cells.serve(FIRST, version=1)
        await bench.cells.drain(SECOND)
        talks = [await bench.talk(f"greedy-{number}", temperature=0.0) for number in range(plan.episodes)]
        records = await bench.cut(talks, version=1, before=bench.cells.kill_store)
        assert all(record.moved_from_store == 0 < record.moved_recomputed for record in records)
        for record in records:
            request = GenerateRequest(
                input_ids=record.prompt_ids,
                rid=f"unmoved-{record.episode}",
                max_new_tokens=len(record.output_ids),
                temperature=0.0,
                version=1,
                weights="a salt under which nothing is cached",
                deadline_s=600.0,
            )
            unmoved = await bench.cells.engines[SECOND].generate(request)
            assert unmoved.cached_tokens == 0
            assert record.output_ids.tolist() == unmoved.output_ids
