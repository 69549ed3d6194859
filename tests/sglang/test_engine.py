"""One real SGLang server on CPU with a tiny random Qwen3, compared with transformers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from redis.asyncio import Redis
from transformers import Qwen3Config, Qwen3ForCausalLM

from activities.engine_memory import EngineMemory
from infra.sglang.client import EngineClient
from infra.sglang.errors import EngineLost, EngineRefused, EngineVersionMismatch
from infra.sglang.generation import GenerateRequest, Generation, OnTokens
from infra.sglang.launch import engine_command, engine_environment
from infra.sglang.weights import checkpoint_shapes
from infra.state import keys
from tests.processes import free_port

pytestmark = pytest.mark.stack

VOCAB = 512
CONTEXT = 4096
START_S = 240.0
CALL_S = 120.0


def tiny_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).float().eval()


@dataclass
class Engine:
    url: str
    process: subprocess.Popen[bytes]
    model_dir: Path
    version: int = 0
    seed: int = 0

    @asynccontextmanager
    async def client(self) -> AsyncIterator[EngineClient]:
        client = EngineClient(self.url, vocab_size=VOCAB, weight_shapes=checkpoint_shapes(self.model_dir))
        try:
            yield client
        finally:
            await client.close()

    async def load(self, client: EngineClient, seed: int) -> str:
        """Update to the weights of ``tiny_model(seed)`` under the next version."""
        checksum = await client.update_weights(dict(tiny_model(seed).state_dict()), self.version + 1)
        self.version, self.seed = self.version + 1, seed
        return checksum

    def reference(self, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
        """float32[len(output)]: teacher-forced log-probs of ``output`` under the engine's current weights."""
        with torch.no_grad():
            logits = tiny_model(self.seed)(torch.tensor([prompt + output])).logits[0]
        scaled = torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1]
        return scaled[torch.arange(len(output)), torch.tensor(output)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    tiny_model(0).save_pretrained(folder / "model")
    port = free_port()
    command = engine_command(
        folder / "model", "127.0.0.1", port, max_total_tokens=32768, context_length=CONTEXT, stream_interval=8
    )
    log = folder / "engine.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=engine_environment(folder), stdout=output, stderr=output, start_new_session=True
        )
    engine = Engine(f"http://127.0.0.1:{port}", process, folder / "model")

    async def wait() -> None:
        async with engine.client() as client:
            await client.wait_ready(START_S)

    try:
        started = time.monotonic()
        try:
            asyncio.run(wait())
        except EngineLost as error:
            pytest.fail(f"{error}\n{log.read_text()[-3000:]}")
        print(f"engine ready after {time.monotonic() - started:.1f} s")
        yield engine
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[EngineClient]:
    async with engine.client() as client:
        yield client


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(5, VOCAB), k=length)


async def sample(
    client: EngineClient,
    ids: list[int],
    *,
    rid: str,
    version: int,
    new: int,
    temperature: float = 1.0,
    stop: list[int] | None = None,
    on_tokens: OnTokens | None = None,
    deadline_s: float = CALL_S,
) -> Generation:
    request = GenerateRequest(
        input_ids=ids,
        rid=rid,
        max_new_tokens=new,
        temperature=temperature,
        stop_token_ids=stop or [],
        version=version,
        on_tokens=on_tokens,
        deadline_s=deadline_s,
    )
    return await client.generate(request)


async def running(client: EngineClient, ids: list[int], rid: str, version: int) -> asyncio.Task[Generation]:
    """A request that would go on for long, returned after its first tokens."""
    begun = asyncio.Event()
    task = asyncio.create_task(
        sample(client, ids, rid=rid, version=version, new=3000, on_tokens=lambda *_: begun.set())
    )
    await asyncio.wait_for(begun.wait(), CALL_S)
    return task


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_those_of_transformers(
    engine: Engine, client: EngineClient, temperature: float, streamed: bool
) -> None:
    seen: list[int] = []
    for length in (1, 40, 600):
        ids = prompt(length)
        seen.clear()
        result = await sample(
            client,
            ids,
            rid=f"parity-{length}",
            version=engine.version,
            new=48,
            temperature=temperature,
            on_tokens=(lambda new, _: seen.extend(new)) if streamed else None,
        )
        assert result.finish == "length"
        assert len(result.output_ids) == 48
        assert result.versions == [engine.version] * 48
        expected = engine.reference(ids, result.output_ids, temperature)
        assert (torch.tensor(result.logprobs) - expected).abs().max() < 1e-4
        assert seen == (result.output_ids if streamed else [])


async def test_the_token_that_stops_a_turn_is_part_of_it(engine: Engine, client: EngineClient) -> None:
    stop = list(range(100, 200))
    result = await sample(client, prompt(30), rid="stop", version=engine.version, new=500, stop=stop)
    assert result.finish == "stop"
    assert result.output_ids[-1] in stop
    assert not set(result.output_ids[:-1]) & set(stop)
    assert len(result.logprobs) == len(result.output_ids)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_aborted_call_continues_elsewhere_as_if_it_had_not_moved(
    engine: Engine, client: EngineClient, streamed: bool
) -> None:
    ids = prompt(60, seed=1)
    if streamed:
        task = await running(client, ids, "moved", engine.version)
    else:
        task = asyncio.create_task(sample(client, ids, rid="moved", version=engine.version, new=3000))
        other = await running(client, prompt(5), "other", engine.version)  # so "moved" has begun as well
        await asyncio.gather(client.abort("other"), other)
    await client.abort("moved")
    partial = await task
    assert partial.finish == "abort"
    assert 0 < len(partial.output_ids) < 3000
    assert len(partial.output_ids) == len(partial.logprobs) == len(partial.versions)

    rest = await sample(client, ids + partial.output_ids, rid="moved-on", version=engine.version, new=30)
    expected = engine.reference(ids, partial.output_ids + rest.output_ids)
    assert (torch.tensor(partial.logprobs + rest.logprobs) - expected).abs().max() < 1e-4


async def test_an_abort_ends_its_own_request_only(engine: Engine, client: EngineClient) -> None:
    short, long = [await running(client, prompt(20), rid, engine.version) for rid in ("call-1", "call-10")]
    await client.abort("call-1")
    assert (await short).finish == "abort"
    assert not long.done()
    await client.abort_all()
    assert (await long).finish == "abort"


async def test_an_abort_that_overtakes_its_request_still_ends_it(engine: Engine, client: EngineClient) -> None:
    task = asyncio.create_task(sample(client, prompt(20), rid="early", version=engine.version, new=3000))
    await asyncio.sleep(0)  # the request is known to the client, not yet to the engine
    await client.abort("early")
    assert (await task).finish == "abort"


async def test_a_call_past_its_deadline_returns_what_it_has(engine: Engine, client: EngineClient) -> None:
    result = await sample(client, prompt(20), rid="late", version=engine.version, new=4000, deadline_s=0.5)
    assert result.finish == "abort"
    assert result.output_ids


async def test_a_cancelled_caller_leaves_nothing_running(engine: Engine, client: EngineClient) -> None:
    task = await running(client, prompt(20), "left", engine.version)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    deadline = time.monotonic() + 3.0  # the engine itself notices a closed connection after about 4 s
    while True:
        try:
            await client.flush_cache()
            break
        except EngineRefused:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


async def test_what_would_kill_the_engine_is_refused_before_the_wire(engine: Engine, client: EngineClient) -> None:
    for bad in ([], [5, VOCAB], [-1]):
        with pytest.raises(ValueError):
            await sample(client, bad, rid="bad", version=engine.version, new=4)
    weights = dict(tiny_model(0).state_dict())
    weights["model.norm.weight"] = torch.zeros(65)
    with pytest.raises(ValueError, match="shape"):
        await client.update_weights(weights, 99)
    with pytest.raises(EngineRefused) as refused:
        await sample(client, prompt(CONTEXT + 1), rid="long", version=engine.version, new=1)
    assert refused.value.status == 400
    assert await client.ready()


async def test_new_weights_are_served_with_no_trace_of_the_old(engine: Engine, client: EngineClient) -> None:
    ids = prompt(1500, seed=2)
    before = await sample(client, ids, rid="old", version=engine.version, new=20)
    again = await sample(client, ids, rid="old-again", version=engine.version, new=20)
    assert again.cached_tokens > 1400
    old_checksum = await client.checksum()
    in_flight = await running(client, prompt(40), "in-flight", engine.version)

    started = time.monotonic()
    checksum = await engine.load(client, seed=engine.seed + 1)
    print(f"update_weights took {time.monotonic() - started:.3f} s")
    cut = await in_flight
    assert cut.finish == "abort"
    assert set(cut.versions) == {engine.version - 1}
    assert checksum != old_checksum
    assert await client.weight_version() == engine.version

    after = await sample(client, ids, rid="new", version=engine.version, new=20)
    assert after.cached_tokens == 0
    assert (torch.tensor(after.logprobs) - engine.reference(ids, after.output_ids)).abs().max() < 1e-4
    drift = engine.reference(ids, before.output_ids) - torch.tensor(before.logprobs)
    assert drift.abs().max() > 1e-2, "the two sets of weights must differ for this test to say anything"

    assert await engine.load(client, seed=engine.seed - 1) == old_checksum


async def test_a_call_held_over_an_update_is_not_answered_by_the_new_weights(
    engine: Engine, client: EngineClient
) -> None:
    await client.pause()
    held = asyncio.create_task(sample(client, prompt(20), rid="held", version=engine.version, new=4))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(held), 0.5)
    await engine.load(client, seed=engine.seed + 1)
    with pytest.raises(EngineVersionMismatch):
        await held


async def test_an_update_begun_by_a_dead_client_does_not_block_the_next(engine: Engine, client: EngineClient) -> None:
    await client.pause()
    await client._post("/begin_weight_update", {})
    await engine.load(client, seed=engine.seed + 1)
    ids = prompt(50)
    result = await sample(client, ids, rid="after", version=engine.version, new=10)
    assert (torch.tensor(result.logprobs) - engine.reference(ids, result.output_ids)).abs().max() < 1e-4


async def test_memory_is_released_under_load_and_taken_back(engine: Engine, client: EngineClient) -> None:
    ids = prompt(50)
    task = await running(client, ids, "interrupted", engine.version)
    for hold in (True, False):
        started = time.monotonic()
        await client.release_memory(hold_requests=hold)
        released = time.monotonic()
        assert await client.ready() is not hold
        await client.resume_memory()
        print(f"release {released - started:.3f} s, resume {time.monotonic() - released:.3f} s")
        assert await client.ready()
    await client.abort("interrupted")
    result = await task
    assert (torch.tensor(result.logprobs) - engine.reference(ids, result.output_ids)).abs().max() < 1e-4


async def test_a_restarted_worker_knows_whether_its_engine_has_its_memory(
    engine: Engine, client: EngineClient, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is told to take back what it holds ends itself, and one that never is stays without memory."""
    told: list[str] = []  # on CPU an engine without its memory samples on: only what it was told shows

    async def post(path: str, *body: Any) -> Any:
        told.append(path)
        return await really(path, *body)

    really = client._post
    monkeypatch.setattr(client, "_post", post)

    def worker() -> EngineMemory:
        return EngineMemory(redis, client, "cell-0")

    await worker().take_back()  # it never gave anything up
    for _ in range(2):  # the second worker finds it done
        assert await worker().release() == await client.incarnation()
    assert told.count("/release_memory_occupation") == 1
    await redis.set(keys.engine_memory("cell-0"), f"releasing {await client.incarnation()}")
    await worker().release()  # the first one died before it knew
    assert told.count("/release_memory_occupation") == 2
    await worker().take_back()
    await worker().take_back()
    assert told.count("/resume_memory_occupation") == 1
    await redis.set(keys.engine_memory("cell-0"), "released another-start")
    await worker().take_back()  # the engine that released is gone, and this one holds its memory
    ids = prompt(50)
    result = await sample(client, ids, rid="taken-back", version=engine.version, new=10)
    assert (torch.tensor(result.logprobs) - engine.reference(ids, result.output_ids)).abs().max() < 1e-4


async def test_loads_count_running_requests(engine: Engine, client: EngineClient) -> None:
    tasks = [await running(client, prompt(20, seed), f"load-{seed}", engine.version) for seed in range(3)]
    deadline = time.monotonic() + CALL_S
    while (loads := await client.loads()).running < 3:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert (loads.running, loads.waiting) == (3, 0)
    assert 0 < loads.used_tokens <= loads.max_tokens
    await client.abort_all()
    assert {result.finish for result in await asyncio.gather(*tasks)} == {"abort"}


def test_only_loopback_is_listened_on(engine: Engine) -> None:
    root = psutil.Process(engine.process.pid)
    addresses = {
        connection.laddr.ip
        for process in [root, *root.children(recursive=True)]
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}


async def test_an_engine_killed_in_mid_call_is_lost_with_what_had_arrived(engine: Engine, client: EngineClient) -> None:
    """Last: it ends the engine."""
    got: list[int] = []
    enough = asyncio.Event()

    def take(new: list[int], _: list[float]) -> None:
        got.extend(new)
        if len(got) > 20:
            enough.set()

    streamed = asyncio.create_task(
        sample(client, prompt(20), rid="s", version=engine.version, new=3000, on_tokens=take)
    )
    whole = asyncio.create_task(sample(client, prompt(20), rid="w", version=engine.version, new=3000))
    await asyncio.wait_for(enough.wait(), CALL_S)
    engine.process.kill()
    with pytest.raises(EngineLost) as lost:
        await streamed
    assert lost.value.output_ids == got
    assert len(lost.value.logprobs) == len(lost.value.versions) == len(got)
    with pytest.raises(EngineLost):
        await whole
    assert not await client.ready()
    with pytest.raises(EngineLost):
        await sample(client, prompt(20), rid="x", version=engine.version, new=1)
