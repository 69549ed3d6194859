"""What the proxy refuses: at once, cheaply, and with a 400 that harnesses do not retry."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from proxy_parts import QUICK, Harness, ProxyStack, until

from infra.state import keys


@pytest.fixture
async def harness(stack: ProxyStack, session: aiohttp.ClientSession) -> Harness:
    await stack.open("cell-0")
    proxy = await stack.proxy()
    harness = Harness(proxy.url, await stack.key(), session)
    harness.user("go")
    return harness


@pytest.mark.parametrize("case", ["unknown", "revoked", "old generation", "none"])
async def test_keys_that_do_not_count_are_400(stack: ProxyStack, harness: Harness, case: str) -> None:
    if case == "unknown":
        harness.key = "another"
    elif case == "none":
        harness.key = ""
    else:
        assert (await harness.post())[0] == 200
        if case == "revoked":
            await stack.redis.delete(keys.key(harness.key))
        else:
            await stack.redis.set(keys.generation_of("ep"), 1)
    status, body = await harness.post()
    assert status == 400 and body["error"]["code"] == "invalid_api_key"


async def test_the_key_may_come_in_either_header(stack: ProxyStack, harness: Harness) -> None:
    body = {"messages": harness.messages}
    url = f"{harness.url}/v1/chat/completions"
    async with harness.session.post(url, json=body, headers={"x-api-key": harness.key}) as response:
        assert response.status == 200


async def test_a_generation_that_ends_during_a_call_records_nothing(stack: ProxyStack, harness: Harness) -> None:
    engine = stack.engines["cell-0"]
    engine.gate.clear()
    answer = asyncio.create_task(harness.post())
    await until(lambda: engine.seen, "asked")
    await stack.redis.set(keys.generation_of("ep"), 1)
    engine.gate.set()
    status, body = await answer
    assert status == 400 and body["error"]["code"] == "invalid_api_key"
    assert await stack.records() == []
    assert await stack.redis.hlen(keys.open_calls("ep")) == 0


async def test_a_prompt_beyond_the_context_is_refused_in_openais_words(stack: ProxyStack, harness: Harness) -> None:
    await stack.key(context_limit=30)
    harness.user("x" * 200)
    status, body = await harness.post()
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 30 tokens" in body["error"]["message"]
    assert await stack.redis.get(keys.truncated("ep")) == b"context"
    assert not stack.engines["cell-0"].seen


async def test_a_turn_ends_at_the_context_limit(stack: ProxyStack, harness: Harness) -> None:
    await harness.post()
    prompt = len(stack.engines["cell-0"].seen[0].input_ids)
    await stack.key("other", context_limit=prompt + 2)
    stack.replies = ["a very long story<|im_end|>"]
    harness.key = "key-other"
    _, body = await harness.post()
    assert body["choices"][0]["finish_reason"] == "length"
    (record,) = await stack.records("other")
    assert record.finish_reason == "context" and len(record.output_ids) == 2


async def test_calls_beyond_the_limit_are_refused(stack: ProxyStack, harness: Harness) -> None:
    await stack.key(max_calls=1)
    await harness.turn()
    harness.user("more")
    status, body = await harness.post()
    assert status == 400 and body["error"]["code"] == "call_limit_exceeded"
    assert await stack.redis.get(keys.truncated("ep")) == b"calls"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logit_bias", {"1": 5}),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "bash"}}),
        ("stop", ["\n"]),
        ("logprobs", True),
        ("functions", [{"name": "f"}]),
        ("max_tokens", 0),
        ("max_completion_tokens", "many"),
        ("messages", []),
        ("messages", "hello"),
        ("messages", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "prefill"}]),
        ("messages", [{"role": "wizard", "content": "a"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("tools", [{"type": "custom", "custom": {"name": "x"}}]),
        ("tools", {"a": 1}),
        ("stream", "yes"),
    ],
)
async def test_what_would_change_sampling_or_is_malformed_is_refused(harness: Harness, field: str, value: Any) -> None:
    status, body = await harness.post(**{field: value})
    if field == "stream":
        body = json.loads(body)
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 1, "stop": None, "logit_bias": {}, "response_format": {"type": "text"}, "tool_choice": "auto"},
        {"temperature": 0, "seed": 3, "user": "me", "parallel_tool_calls": False, "reasoning_effort": "high"},
    ],
)
async def test_harmless_fields_are_accepted(harness: Harness, extra: dict[str, Any]) -> None:
    assert (await harness.post(**extra))[0] == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"messages": [NaN]}'])
async def test_bodies_that_are_no_request_are_400(harness: Harness, body: bytes) -> None:
    url, headers = f"{harness.url}/v1/chat/completions", {"x-api-key": harness.key}
    async with harness.session.post(url, data=body, headers=headers) as response:
        assert response.status == 400 and "error" in await response.json()


@pytest.mark.parametrize("chunked", [True, False])
async def test_an_oversized_body_is_refused_before_it_is_read(
    stack: ProxyStack, harness: Harness, chunked: bool
) -> None:
    proxy = await stack.proxy(QUICK.model_copy(update={"body_bytes": 1000}))
    url, headers = f"{proxy.url}/v1/chat/completions", {"x-api-key": harness.key}
    big: Any = b"x" * 5000

    async def parts() -> Any:
        yield big

    async with harness.session.post(url, data=parts() if chunked else big, headers=headers) as response:
        assert response.status == 413


async def test_unknown_paths_probes_and_methods(stack: ProxyStack, harness: Harness) -> None:
    async with harness.session.get(f"{harness.url}/v1/nothing") as response:
        assert response.status == 404 and (await response.json())["error"]["code"] == "unknown_url"
    async with harness.session.get(f"{harness.url}/v1/chat/completions") as response:
        assert response.status == 404
    async with harness.session.get(f"{harness.url}/v1/models") as response:
        assert response.status == 200 and (await response.json())["data"]
    async with harness.session.get(f"{harness.url}/healthz") as response:
        assert response.status == 200 and (await response.json())["routes"]["cell-0"]["open"]


async def test_lone_surrogates_of_undecodable_output_become_replacement_characters(
    stack: ProxyStack, harness: Harness
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a \udcff b"}]}).encode()
    url, headers = f"{harness.url}/v1/chat/completions", {"x-api-key": harness.key}
    async with harness.session.post(url, data=body, headers=headers) as response:
        assert response.status == 200
    assert "�" in stack.renderer.tokenizer.decode(stack.engines["cell-0"].seen[0].input_ids)


async def test_lost_records_end_the_episode(stack: ProxyStack, harness: Harness) -> None:
    await harness.turn()
    await stack.redis.delete(keys.calls("ep"))
    harness.user("more")
    status, body = await harness.post()
    assert status == 400 and body["error"]["code"] == "records_lost"
