"""Bodies made from the published OpenAPI document, right and wrong: each is answered, none breaks a record."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from proxy_parts import ProxyStack
from redis.asyncio import Redis
from schemathesis import Case, GenerationMode

from infra.chat.qwen3 import Qwen3Renderer
from proxy.dialects.openapi import openapi
from workers.harness_check.verify import sequences

WAIT_S = 60.0
EPISODE = "fuzzed"
OPERATIONS = [found.ok() for found in schemathesis.openapi.from_dict(openapi()).get_all_operations()]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own: schemathesis calls from this one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_S)
    loop.close()


@pytest.fixture(scope="module")
def served(loop: asyncio.AbstractEventLoop, valkey_url: str, renderer: Qwen3Renderer) -> Iterator[ProxyStack]:
    async def start() -> ProxyStack:
        stack = ProxyStack(Redis.from_url(valkey_url), renderer)
        await stack.redis.flushdb()
        await stack.open("cell-0")
        await stack.proxy()
        await stack.key(EPISODE, max_calls=1_000_000, max_new_tokens=16)
        return stack

    stack = asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT_S)
    yield stack
    asyncio.run_coroutine_threadsafe(stack.gateways[0].stop(), loop).result(WAIT_S)
    asyncio.run_coroutine_threadsafe(stack.redis.aclose(), loop).result(WAIT_S)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_every_body_gets_an_answer_of_its_dialect(
    served: ProxyStack,
    loop: asyncio.AbstractEventLoop,
    operation: schemathesis.APIOperation,
    mode: GenerationMode,
) -> None:
    statuses = set[int]()
    headers = {"authorization": f"Bearer key-{EPISODE}"}

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=40,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Case) -> None:
        case.headers.update(headers)
        answer = case.call(base_url=served.gateways[0].url, timeout=WAIT_S)
        statuses.add(answer.status_code)
        assert answer.status_code in {200, 400, 404, 405, 413, 415, 422}, answer.text
        if answer.status_code >= 400 and case.method.upper() == "POST":
            assert answer.json()["error"]["message"]

    ask()
    assert statuses & ({200} if mode is GenerationMode.POSITIVE else {400, 404, 405})

    records = asyncio.run_coroutine_threadsafe(served.records(EPISODE), loop).result(WAIT_S)
    seen = [request.input_ids + request.output_ids for request in served.engines["cell-0"].seen]
    assert sorted(map(tuple, sequences(records))) == sorted(map(tuple, seen))
