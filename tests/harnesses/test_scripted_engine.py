"""The scripted engine that checks, benches and tests share, and the server behind the partial stack."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis import Redis

from infra.sglang.errors import EngineLost
from infra.sglang.generation import GenerateRequest, Generation
from workers.errors import UsageError
from workers.harness_check.engine import Script, ScriptedEngine, ScriptedTurn
from workers.stack.valkey import Valkey

END = 9
TURN = [1, 2, 3, 4, 5, END]
WAIT_S = 10.0


def engine_of(*turns: ScriptedTurn) -> ScriptedEngine:
    left = list(turns)
    return ScriptedEngine(Script(lambda prompt: left.pop(0)))


async def ask(engine: ScriptedEngine, call: str, prompt: list[int], attempt: int = 0, most: int = 100) -> Generation:
    request = GenerateRequest(
        input_ids=prompt,
        rid=f"{call}.{attempt}",
        max_new_tokens=most,
        temperature=1.0,
        stop_token_ids=[END],
        version=3,
        deadline_s=WAIT_S,
    )
    return await asyncio.wait_for(engine.generate(request), WAIT_S)


async def test_a_turn_ends_by_its_stop_token_or_where_it_is_cut() -> None:
    engine = engine_of(ScriptedTurn(TURN), ScriptedTurn(TURN))
    whole = await ask(engine, "a", [7, 8])
    assert (whole.output_ids, whole.finish, whole.versions) == (TURN, "stop", [3] * 6)
    cut = await ask(engine, "b", [7, 8], most=4)
    assert (cut.output_ids, cut.finish) == (TURN[:4], "length")
    assert [seen.sequence for seen in engine.seen] == [[7, 8, *TURN], [7, 8, *TURN[:4]]]


async def test_a_call_that_an_engine_died_in_goes_on_where_it_was_on_another_of_its_script() -> None:
    first = engine_of(ScriptedTurn(TURN, dies=True))
    second = ScriptedEngine(first.script)
    with pytest.raises(EngineLost) as lost:
        await ask(first, "a", [7])
    assert lost.value.output_ids == TURN[:3] and first.seen[0].lost
    rest = await ask(second, "a", [7, *TURN[:3]], attempt=1)
    assert (rest.output_ids, rest.finish) == (TURN[3:], "stop")


async def test_a_turn_is_held_back_once_until_the_gate_opens_or_it_is_aborted() -> None:
    engine = engine_of(ScriptedTurn(TURN, held=True), ScriptedTurn(TURN), ScriptedTurn(TURN, held=True))
    held = asyncio.create_task(ask(engine, "a", [7]))
    await asyncio.wait_for(engine.holding.wait(), WAIT_S)
    behind = asyncio.create_task(ask(engine, "b", [8]))
    await engine.abort("a.0")
    assert (await held).finish == "abort" and engine.seen[0].held and not engine.seen[0].output_ids
    assert not behind.done(), "the gate is still closed"
    engine.gate.set()
    assert (await behind).output_ids == TURN
    assert (await ask(engine, "c", [7])).output_ids == TURN, "the resumed harness asks again, and gets its turn"


async def test_what_was_delivered_before_an_abort_is_kept() -> None:
    engine = engine_of(ScriptedTurn(TURN))
    engine.stop_after = 2
    engine.gate.clear()
    asked = asyncio.create_task(ask(engine, "a", [7]))
    await asyncio.sleep(0)
    await engine.abort("a.0")
    kept = await asked
    assert (kept.output_ids, kept.finish) == (TURN[:2], "abort")
    engine.gate.set()
    assert (await ask(engine, "a", [7, *TURN[:2]], attempt=1)).output_ids == TURN[2:]


def test_a_valkey_keeps_address_and_data_through_a_kill(tmp_path: Path) -> None:
    with Valkey(tmp_path) as valkey, Redis.from_url(valkey.url) as client:
        client.set("key", "value")
        valkey.kill()
        valkey.start()
        assert client.get("key") == b"value"


def test_a_valkey_that_cannot_start_says_where(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        Valkey(tmp_path / "nowhere").start()
