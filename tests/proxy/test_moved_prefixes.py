"""What is counted of the prefix of a call that goes to another engine than the one with its KV."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
from proxy_parts import Harness, ProxyStack, call_text, until

from infra.sglang.generation import Finish, Generation
from infra.state.keys import Route
from proxy.calls.moved_prefixes import ComputedPrefix, MovedPrefixes, PolicyKv
from trajectory import records


def route(cell: str, version: int = 0, incarnation: str = "i0", weights: str = "") -> Route:
    return Route(cell=cell, url=cell, incarnation=incarnation, epoch=1, open=True, version=version, weights=weights)


def answer(sampled: int, finish: Finish = "abort", *, cached: int = 0, storage: int = 0) -> Generation:
    return Generation([1] * sampled, [-1.0] * sampled, [0] * sampled, finish, cached, 0, storage)


def counted(moved: MovedPrefixes) -> tuple[int, int, int]:
    return moved.tokens, moved.from_store, moved.recomputed


def test_a_call_that_stays_moves_nothing() -> None:
    moved = MovedPrefixes(at=ComputedPrefix("a", 100))
    moved.count(route("a"), 120, answer(10, cached=96))
    moved.count(route("a"), 130, answer(10, "stop", cached=128))
    assert counted(moved) == (0, 0, 0)


def test_each_move_counts_the_tokens_whose_kv_stayed_behind() -> None:
    moved = MovedPrefixes(at=ComputedPrefix("a", 100))
    moved.count(route("b"), 120, answer(11, cached=96, storage=64))  # the other 32 lay on b already
    assert counted(moved) == (100, 64, 4)
    moved.count(route("c"), 131, answer(5, "stop", cached=128, storage=128))
    assert counted(moved) == (100 + 130, 64 + 128, 4 + 2), "the last sampled token has no KV yet"


def test_what_an_engine_has_beyond_the_moved_prefix_belongs_to_no_move() -> None:
    moved = MovedPrefixes(at=ComputedPrefix("a", 20))
    moved.count(route("b"), 200, answer(1, "stop", cached=192, storage=192))
    assert counted(moved) == (20, 20, 0)


def test_a_request_given_up_before_it_began_changes_nothing() -> None:
    moved = MovedPrefixes(at=ComputedPrefix("a", 100))
    moved.count(route("b"), 120, answer(0))
    assert counted(moved) == (0, 0, 0) and moved.at == ComputedPrefix("a", 100)
    moved.count(route("a"), 120, answer(3, "stop", cached=96))
    assert counted(moved) == (0, 0, 0)


def test_a_restarted_engine_is_elsewhere() -> None:
    moved = MovedPrefixes()
    moved.count(route("a"), 50, answer(7))
    moved.count(route("a", incarnation="i1"), 57, answer(3, "stop", cached=48, storage=48))
    assert counted(moved) == (56, 48, 8)


async def test_nobody_waits_for_a_prefix_that_cannot_be_used() -> None:
    class Asked(Exception):
        pass

    class RefusingArrival:
        """Test double: says that it was asked."""

        async def wait(self, tokens: list[int], salt: str, deadline_s: float) -> bool:
            raise Asked(f"{len(tokens)} {salt}")

    kv = PolicyKv(1, RefusingArrival())  # type: ignore[arg-type]
    moved = MovedPrefixes()
    moved.count(route("a", 3, weights="w"), 50, answer(7))
    prompt = [0] * 57
    await moved.arrive(PolicyKv(), route("b", 3, weights="w"), prompt)
    await moved.arrive(kv, route("a", 3, weights="w"), prompt)
    await moved.arrive(kv, route("b", 4, weights="w"), prompt)
    await moved.arrive(kv, route("b", 3, weights="x"), prompt)
    try:
        await moved.arrive(kv, route("b", 3, weights="w"), prompt)
    except Asked as asked:
        assert str(asked) == "56 3-w"
    else:
        raise AssertionError("the last pages were not waited for")


async def test_moves_are_in_the_records_and_in_the_counts(stack: ProxyStack, session: aiohttp.ClientSession) -> None:
    first = await stack.open("cell-0")
    proxy = await stack.proxy()
    harness = Harness(proxy.url, await stack.key(max_new_tokens=400), session)
    harness.user("go")
    stack.replies = [call_text("cat fox.txt"), "one two three four five six<|im_end|>"]
    message = await harness.turn()
    second = await stack.open("cell-1")
    await stack.close("cell-0")
    harness.answer(message, "the quick brown fox")
    second.gate.clear()
    second.stop_after = 4
    turn = asyncio.create_task(harness.turn())
    await until(lambda: second.seen and second.seen[0].output_ids, "asked")
    await stack.open("cell-0", epoch=3)
    await stack.close("cell-1")
    second.gate.set()
    await turn
    one, two = await stack.records()
    assert one.moved_tokens == 0
    between, within = two.kept, len(second.seen[0].input_ids) + 3
    assert two.moved_tokens == between + within
    assert (two.moved_from_store, two.moved_recomputed) == (0, two.moved_tokens - 2 * 7), "the scripted engine has 7"
    assert two.moved_bytes == 0
    assert first.seen[1].input_ids == second.seen[0].input_ids + second.seen[0].output_ids
    assert proxy.gateway.counts[""]["moved_tokens"] == two.moved_tokens


def test_records_from_before_there_were_moves_can_be_read() -> None:
    record = records.make_record(
        prompt_ids=[1, 2],
        output_ids=[3],
        logprobs=[-1.0],
        versions=[0],
        episode="e",
        seq=0,
        prev=records.FIRST_HASH,
        agent="root",
        parent=-1,
        kept=0,
        temperature=1.0,
        finish_reason="stop",
        cells=["a"],
        started_at=0.0,
        active_s=0.0,
        held_s=0.0,
        moved_tokens=5,
    )
    fields = {name: value for name, value in msgspec.structs.asdict(record).items() if not name.startswith("moved_")}
    old = records.decode(msgspec.msgpack.encode(fields))
    assert (old.moved_tokens, old.moved_from_store, old.moved_recomputed, old.moved_bytes) == (0, 0, 0, 0)
    assert records.decode(records.encode(record)).moved_tokens == 5
