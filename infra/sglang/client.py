"""One engine over HTTP: generation by token ids, aborts, pauses, memory and weight updates.

The invariant: nothing that would kill or confuse the engine leaves this process (ids outside the vocabulary, weights
of another shape, a release while it runs), and no token is lost that the engine reported. An abort is repeated
until its request is over, because SGLang forgets an abort that overtakes its request or that meets one held by a
pause.

It knows nothing of routing, episodes or text. torch is imported only to update weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import orjson

from infra.sglang.errors import EngineError, EngineLost, EngineRefused
from infra.sglang.generation import (
    Assembly,
    GenerateRequest,
    Generation,
    OnTokens,
    encode_body,
    generate_body,
    wire_id,
)
from infra.sglang.weights import Shape, check_weights, pack_weights

if TYPE_CHECKING:
    import torch

PauseMode = Literal["abort", "retract", "in_place"]

CONNECT_S = 5.0
CONTROL_S = 60.0
"""Deadline of one control request (a weight update of a large model included)."""
ABORT_ANSWER_S = 10.0
"""How long an aborted request may take to give its tokens back before the engine counts as lost."""
ABORT_REPEAT_S = 0.2
IDLE_POLL_S = 0.02
READY_POLL_S = 0.25
KEEP_ALIVE_S = 30.0
"""Shorter than the server's (``launch.HTTP_KEEP_ALIVE_S``), so that a request never meets a closing connection."""
RESIDENT = ("kv_cache", "weights", "cuda_graph")


@dataclass(frozen=True, slots=True)
class Loads:
    """What the scheduler last published: up to 15 decode rounds old, and older than the pause while it is paused."""

    running: int
    waiting: int
    used_tokens: int
    max_tokens: int


class EngineClient:
    """Client of the engine at ``url``, for one event loop. ``close()`` ends it.

    ``vocab_size`` bounds the ids that may be sent. ``weight_shapes`` (``weights.checkpoint_shapes`` of the model
    that the engine was started on) is needed by ``update_weights`` only.
    """

    def __init__(self, url: str, *, vocab_size: int, weight_shapes: Mapping[str, Shape] | None = None) -> None:
        self.url = url.rstrip("/")
        self.vocab_size = vocab_size
        self.weight_shapes = weight_shapes
        self._session: aiohttp.ClientSession | None = None
        self._in_flight: dict[str, asyncio.Event] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Finish pending aborts and close the connections."""
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Readiness and state

    async def ready(self) -> bool:
        """Whether the engine takes requests now: it has warmed up and is not paused."""
        try:
            async with self._http().get("/ready", timeout=aiohttp.ClientTimeout(total=CONNECT_S)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def wait_ready(self, deadline_s: float) -> None:
        """Return when the engine is ready. Raises EngineLost after ``deadline_s`` seconds."""
        deadline = time.monotonic() + deadline_s
        while not await self.ready():
            if time.monotonic() > deadline:
                raise EngineLost(f"{self.url} was not ready within {deadline_s} s")
            await asyncio.sleep(READY_POLL_S)

    async def weight_version(self) -> int:
        """The version that the engine says it serves."""
        return int((await self._json("GET", "/model_info"))["weight_version"])

    async def incarnation(self) -> str:
        """The name that this start of the server was given (``launch.engine_command``)."""
        return str((await self._json("GET", "/model_info"))["served_model_name"])

    async def loads(self) -> Loads:
        """Raises EngineRefused with status 404 when the engine has no such report, and other EngineErrors."""
        answer = await self._control("GET", "/v1/loads?include=core", None)
        try:
            ranks = orjson.loads(answer)["loads"]
            return Loads(
                running=sum(rank["num_running_reqs"] for rank in ranks),
                waiting=sum(rank["num_waiting_reqs"] for rank in ranks),
                used_tokens=sum(rank["num_used_tokens"] for rank in ranks),
                max_tokens=sum(rank["max_total_num_tokens"] for rank in ranks),
            )
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise EngineError(f"{self.url} reports a load that can't be read: {answer[:200]!r}") from error

    # Generation

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample from the engine until a stop token, ``max_new_tokens`` or an abort, which gives the tokens sampled so
        far. Cancelling the caller aborts the request in the background.

        Raises ValueError before anything is sent (see ``generate_body``, and an id already in flight), EngineLost,
        EngineRefused (a prompt beyond the context length, status 400), EngineVersionMismatch.
        """
        body, rid = generate_body(request, self.vocab_size), request.rid
        if rid in self._in_flight:
            raise ValueError(f"request {rid} is already in flight")
        over = self._in_flight[rid] = asyncio.Event()
        got = Assembly(request.version)
        timer = asyncio.get_running_loop().call_later(request.deadline_s, self._spawn_abort, rid)
        try:
            async with asyncio.timeout(request.deadline_s + ABORT_ANSWER_S):
                await self._exchange(body, got, request.on_tokens)
        except asyncio.CancelledError:
            self._spawn_abort(rid)
            raise
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            cause = f"{type(error).__name__}: {error}"
            raise EngineLost(
                f"{self.url} lost during {rid}: {cause}", got.output_ids, got.logprobs, got.versions
            ) from error
        finally:
            timer.cancel()
            del self._in_flight[rid]
            over.set()
        return got.result()

    async def _exchange(self, body: dict[str, Any], got: Assembly, on_tokens: OnTokens | None) -> None:
        async with self._http().post("/generate", data=encode_body(body)) as response:
            if response.status != 200:
                raise _refusal("/generate", response.status, await response.read())
            if on_tokens is None:
                got.add(orjson.loads(await response.read()))
            else:
                await _read_stream(response, got, on_tokens)
        if not got.finished:
            raise aiohttp.ClientPayloadError("the answer ended before the generation did")

    async def abort(self, rid: str, deadline_s: float = ABORT_ANSWER_S) -> None:
        """End a request; its ``generate`` returns the tokens sampled so far. Unknown ids are fine.

        For a request of this client, returns when ``generate`` has its answer, and raises EngineError if that takes
        longer than ``deadline_s`` seconds (an engine that was paused before the request started holds it until
        ``resume``). For any other, the abort is sent once. Abort *before* pausing: a request that a ``retract``
        pause put back into the queue gives back only the tokens already reported (up to 49 fewer).
        """
        deadline = time.monotonic() + deadline_s
        while True:
            await self._post("/abort_request", {"rid": wire_id(rid)})
            over = self._in_flight.get(rid)
            if over is None or await _within(over.wait(), ABORT_REPEAT_S):
                return
            if time.monotonic() > deadline:
                raise EngineError(f"{self.url}: request {rid} did not end within {deadline_s} s of its abort")

    async def abort_all(self, deadline_s: float = ABORT_ANSWER_S) -> None:
        """End every request, of whichever client; returns when the engine has none and its KV cache is empty.

        Raises EngineError if that takes longer than ``deadline_s`` seconds (new requests keep coming).
        """
        deadline = time.monotonic() + deadline_s
        while True:
            await self._post("/abort_request", {"abort_all": True})
            if await self._flushed():
                return
            if time.monotonic() > deadline:
                raise EngineError(f"{self.url} still has requests {deadline_s} s after aborting all")
            await asyncio.sleep(IDLE_POLL_S)

    def _spawn_abort(self, rid: str) -> None:
        if self._session is None:
            return  # closed: the engine ends what it can no longer answer

        async def send() -> None:
            try:
                await self.abort(rid)
            except EngineError:
                return  # nobody waits for this one: the engine is gone, or ``generate`` reports it lost

        task = asyncio.get_running_loop().create_task(send())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # Pause, memory, cache

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop sampling. New requests are held until ``resume``.

        ``retract`` puts running requests back into the queue (their prefix is recomputed), ``in_place`` keeps them
        and their KV, ``abort`` ends them (takes 1 s). A paused SGLang scheduler uses a full core: pause briefly.
        """
        await self._post("/pause_generation", {"mode": mode})

    async def _pause_idle(self, deadline_s: float = ABORT_ANSWER_S) -> None:
        """Pause with nothing in flight and the KV cache dropped; running requests go back to the queue.

        A paused engine doesn't finish what it has begun to write to the KV store, and counts as busy for good: then
        it goes on for a moment and is paused again. Raises EngineError after ``deadline_s`` seconds of that.
        """
        deadline = time.monotonic() + deadline_s
        while True:
            await self.pause("retract")
            if await self._flushed():
                return
            if time.monotonic() > deadline:
                raise EngineError(f"{self.url} was still writing its KV after {deadline_s} s")
            await self.resume()
            await asyncio.sleep(IDLE_POLL_S)

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def flush_cache(self) -> None:
        """Drop the KV cache. Raises EngineRefused (400) while requests run."""
        await self._post("/flush_cache")

    async def release_memory(self, *, hold_requests: bool = False) -> None:
        """Give up serving memory (weights, KV cache); running requests go back to the queue.

        ``hold_requests`` leaves the engine paused until ``resume_memory``, so that a stray request waits instead of
        touching memory that is gone: needed wherever memory is really released. On CPU nothing is, and a paused
        scheduler would take a core from the trainer.
        """
        await self._pause_idle()  # releasing under a running request ends the server
        await self._post("/release_memory_occupation", {"tags": RESIDENT})
        if not hold_requests:
            await self.resume()

    async def resume_memory(self) -> None:
        """Take serving memory again and sample on. An engine that holds its memory ends itself: the caller knows."""
        await self._post("/resume_memory_occupation", {"tags": RESIDENT})
        await self.resume()

    # Weights

    async def update_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> str:
        """Replace all weights, drop the KV cache and serve ``version``. Returns the engine's checksum of its weights.

        ``tensors``: every tensor of the checkpoint by its Hugging Face name, float32. Requests still running are
        aborted; those that arrive meanwhile wait and then fail with EngineVersionMismatch.

        Raises ValueError before anything is sent if names, shapes or dtypes aren't the model's. After any other
        error the engine's weights are undefined and it stays paused: update again, or restart it.
        """
        if self.weight_shapes is None:
            raise ValueError("this client was not given the model's weight shapes")
        packed = await asyncio.to_thread(pack_weights, check_weights(tensors, self.weight_shapes))
        await self.abort_all()
        await self._pause_idle()
        await self._begin_update()
        await self._post("/update_weights_from_tensor", {"serialized_named_tensors": [packed], "flush_cache": True})
        await self._post("/end_weight_update", {})
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        await self.flush_cache()
        checksum = await self.checksum()
        await self.resume()
        return checksum

    async def checksum(self) -> str:
        """Checksum of the weights that the engine holds; equal weights have equal checksums on any engine."""
        answer = await self._post("/weights_checker", {"action": "checksum"})
        return str(orjson.loads(answer)["per_engine_checksum"])

    async def _begin_update(self) -> None:
        try:
            await self._post("/begin_weight_update", {})
        except EngineRefused as refusal:
            if "already open" not in refusal.message:
                raise
            await self._post("/end_weight_update", {})  # left by an update whose client died
            await self._post("/begin_weight_update", {})

    # HTTP

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                self.url,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                headers={"Content-Type": "application/json"},
            )
        return self._session

    async def _flushed(self) -> bool:
        try:  # not with the engine's own ``timeout``: an idle scheduler looks at it once a second
            await self.flush_cache()
        except EngineRefused as refusal:
            if refusal.status != 400:
                raise
            return False
        return True

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        return await self._control("POST", path, body)

    async def _json(self, method: str, path: str) -> Any:
        return orjson.loads(await self._control(method, path, None))

    async def _control(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        data = None if body is None else orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=CONTROL_S, sock_connect=CONNECT_S)
        try:
            async with self._http().request(method, path, data=data, timeout=timeout) as response:
                answer = await response.read()
                if response.status != 200:
                    raise _refusal(path, response.status, answer)
                return answer
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost(f"{self.url}{path}: {type(error).__name__}: {error}") from error


async def _read_stream(response: aiohttp.ClientResponse, got: Assembly, on_tokens: OnTokens) -> None:
    """Feed server-sent events to the assembly. Lines may be longer than aiohttp's own line reader takes."""
    pending = b""
    async for chunk in response.content.iter_any():
        *events, pending = (pending + chunk).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data in (event, b"[DONE]"):
                continue
            ids, logprobs = got.add(orjson.loads(data))
            if ids:
                on_tokens(ids, logprobs)


def _refusal(path: str, status: int, answer: bytes) -> EngineRefused:
    message = answer.decode(errors="replace").strip()
    try:
        parsed = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return EngineRefused(path, status, message)
    if isinstance(parsed, dict):
        error = parsed.get("error", parsed)
        message = str(error.get("message", message)) if isinstance(error, dict) else str(error)
    return EngineRefused(path, status, message)


async def _within(condition: Awaitable[object], seconds: float) -> bool:
    try:
        await asyncio.wait_for(condition, seconds)
    except TimeoutError:
        return False
    return True
