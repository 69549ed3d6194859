"""Arbitrary conversations through a real proxy: always an answer, always an exact prefix chain."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_parts import SPECIAL, Harness, ProxyStack
from redis.asyncio import Redis

from infra.chat.qwen3 import Qwen3Renderer
from workers.harness_check.verify import sequences

spelled = st.lists(st.sampled_from([*SPECIAL, "\n", " ", "\x00", '"', "{", "}", "\\"]), max_size=6).map("".join)
texts = st.one_of(st.text(max_size=30), spelled)  # lone surrogates included
contents = st.one_of(texts, st.none(), st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=3))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
messages = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "developer"]), "content": contents}),
        st.fixed_dictionaries({"role": st.just("assistant"), "content": contents, "reasoning_content": texts}),
        st.fixed_dictionaries({"role": st.just("tool"), "content": contents, "tool_call_id": texts}),
    ),
    min_size=1,
    max_size=5,
)
numbers = itertools.count()


@asynccontextmanager
async def running(url: str, renderer: Qwen3Renderer) -> AsyncIterator[ProxyStack]:
    redis = Redis.from_url(url)
    stack = ProxyStack(redis, renderer)
    await stack.open("cell-0")
    await stack.proxy()
    try:
        yield stack
    finally:
        await stack.gateways[0].stop()
        await redis.aclose()


@given(st.lists(st.tuples(values, texts, st.booleans()), min_size=1, max_size=4), texts)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tool_loop_is_append_only(
    valkey_url: str, renderer: Qwen3Renderer, turns: list[tuple[Any, str, bool]], first: str
) -> None:
    async def scenario() -> None:
        async with running(valkey_url, renderer) as stack, aiohttp.ClientSession() as session:
            name = f"loop{next(numbers)}"
            harness = Harness(stack.gateways[0].url, await stack.key(name, max_new_tokens=4000), session)
            harness.user(first)
            for value, text, ends in turns:
                call = json.dumps({"name": "bash", "arguments": {"a": value}})
                end = [renderer.im_end] if ends else []
                stack.replies = [[renderer.call_open, *renderer.text(call), renderer.call_close, *end]]
                message = await harness.turn(temperature=1)
                assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": value}
                message["tool_calls"][0]["function"]["arguments"] = json.dumps(
                    {"a": value}, separators=(",", ":"), ensure_ascii=True
                )
                harness.answer(message, text)
            records = await stack.records(name)
            full = sequences(records)
            for number, seen in enumerate(stack.engines["cell-0"].seen):
                assert full[number] == seen.input_ids + seen.output_ids
                assert number == 0 or full[number][: len(full[number - 1])] == full[number - 1]

    asyncio.run(scenario())


@given(st.lists(messages, min_size=1, max_size=6), st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_conversation_is_answered_with_a_5xx(
    valkey_url: str, renderer: Qwen3Renderer, requests: list[list[dict[str, Any]]], streams: bool
) -> None:
    async def scenario() -> None:
        async with running(valkey_url, renderer) as stack, aiohttp.ClientSession() as session:
            name = f"any{next(numbers)}"
            harness = Harness(stack.gateways[0].url, await stack.key(name), session)
            for request in requests:
                harness.messages = request
                status, body = await harness.post(stream=streams)
                assert status == (400 if request[-1]["role"] == "assistant" else 200), body
            full = sequences(await stack.records(name))
            assert full == [seen.input_ids + seen.output_ids for seen in stack.engines["cell-0"].seen]

    asyncio.run(scenario())
