"""One turn, sampled on as many cells as it takes: nothing that an engine reported is ever sampled again.

When a route closes, an engine dies or gives a request up, the tokens so far are kept and the rest is asked of
another cell as prompt + tokens so far. Every token carries the version of the engine that sampled it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from dataclasses import dataclass, field

from infra.sglang.errors import EngineError, EngineLost, EngineRefused
from infra.sglang.generation import GenerateRequest, Generation
from infra.state import keys
from proxy.calls.moved_prefixes import Computed, Kv, Moves
from proxy.calls.recorder import OpenCall, Recorder
from proxy.errors import BadRequest, ContextExceeded
from proxy.limits import Limits
from proxy.routing.router import Router
from proxy.routing.slot import Slot

log = logging.getLogger(__name__)
STREAM_FROM = 256
"""Turns that may be at least this long are streamed from the engine, so that a dead one loses nothing; for short
turns that costs more than sampling them again."""


@dataclass(frozen=True)
class Job:
    rid: str
    digest: bytes
    key: keys.EpisodeKey
    prompt: array[int]
    """int32[p]"""
    max_new_tokens: int
    near: str
    """The cell that served the parent call, "" for none."""
    kept: int = 0
    """Leading tokens of the prompt that the parent call had."""
    seniority: int = 0
    """Calls that the episode has made."""


@dataclass
class Sampled:
    """What was sampled, in columns of equal length, and what it took."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    """``stop`` or ``length``."""
    cells: list[str] = field(default_factory=list)
    active_s: float = 0.0
    held_s: float = 0.0
    """All seconds held."""
    uncredited_s: float = 0.0
    """Seconds of ``held_s`` that are not in Redis yet."""
    resampled: int = 0
    cached_tokens: int = 0
    moves: Moves = field(default_factory=Moves)

    def add(self, ids: list[int], logprobs: list[float], versions: list[int]) -> None:
        self.output_ids += ids
        self.logprobs += logprobs
        self.versions += versions


@dataclass
class _Arrived:
    """What a streamed request has reported so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first_at: float = 0.0

    def add(self, ids: list[int], logprobs: list[float]) -> None:
        self.first_at = self.first_at or time.monotonic()
        self.ids += ids
        self.logprobs += logprobs


class Sampler:
    def __init__(
        self, router: Router, recorder: Recorder, stop_token_ids: tuple[int, ...], limits: Limits, kv: Kv
    ) -> None:
        self._router, self._recorder = router, recorder
        self._stops = stop_token_ids
        self._limits = limits
        self._kv = kv

    async def sample(self, job: Job) -> Sampled:
        """Raises NoCell when no cell serves the call in time, ContextExceeded or BadRequest when engines refuse it."""
        got = Sampled()
        if job.near:
            got.moves.at = Computed(job.near, job.kept)
        since = time.monotonic()
        deadline = since + self._limits.hold_s
        attempt = 0
        while not self._finished(job, got):
            prompt = job.prompt + array("i", got.output_ids) if got.output_ids else job.prompt
            slot = Slot(
                f"{job.rid}.{attempt}",
                job.key.episode,
                job.key.min_version,
                job.key.max_version,
                near=job.near,
                tokens=len(prompt),
                seniority=job.seniority,
                since=since,
            )
            attempt += 1
            if not self._router.try_grant(slot):
                await self._hold(job, slot, got, deadline)
            try:
                await self._ask(job, slot, prompt, got)
            finally:
                self._router.release(slot)
        return got

    def _finished(self, job: Job, got: Sampled) -> bool:
        if not got.finish and got.output_ids:  # cut off at the very end
            if got.output_ids[-1] in self._stops:
                got.finish = "stop"
            elif len(got.output_ids) >= job.max_new_tokens:
                got.finish = "length"
        return bool(got.finish)

    async def _hold(self, job: Job, slot: Slot, got: Sampled, deadline: float) -> None:
        """Wait for the slot. Its seconds are credited whether or not it is granted."""
        episode, since, granted = job.key.episode, time.monotonic(), False
        await self._recorder.hold(episode, job.rid)
        try:
            await self._router.grant(slot, deadline)
            granted = True
        finally:
            held_s = time.monotonic() - since
            got.held_s += held_s
            try:
                await self._recorder.unhold(episode, job.rid, held_s)
            except BaseException:
                if granted:
                    self._router.release(slot)
                raise

    async def _ask(self, job: Job, slot: Slot, prompt: array[int], got: Sampled) -> None:
        route, again = slot.route, bool(got.cells)
        since = time.monotonic()
        await got.moves.arrive(self._kv, route, prompt)
        got.held_s += time.monotonic() - since
        got.uncredited_s += time.monotonic() - since
        call = OpenCall(self._router.proxy_id, route.cell, slot.rid, job.digest.hex(), time.time())
        await self._recorder.open(job.key.episode, job.rid, call)
        if slot.revoked_at is not None:  # closed before the engine was asked
            return
        if route.cell not in got.cells[-1:]:
            got.cells.append(route.cell)
        arrived = _Arrived()
        left = job.max_new_tokens - len(got.output_ids)
        asked = time.monotonic()
        request = GenerateRequest(
            input_ids=prompt,
            rid=slot.rid,
            max_new_tokens=left,
            temperature=job.key.temperature,
            stop_token_ids=self._stops,
            version=route.version,
            weights=route.weights,
            on_tokens=arrived.add if left >= STREAM_FROM else None,
            deadline_s=self._limits.generate_s,
        )
        task = asyncio.ensure_future(slot.engine.generate(request))
        generation = await self._answer(job, slot, task, arrived, got)
        ended = time.monotonic()
        # Held: recomputing the prefix on another cell, and what passes between the closing and the answer.
        active_from = arrived.first_at if again and arrived.first_at else asked
        active_to = max(active_from, min(ended, slot.revoked_at or ended))
        got.active_s += active_to - active_from
        held_s = (active_from - asked) + (ended - active_to)
        got.held_s += held_s
        got.uncredited_s += held_s
        if generation is None:
            return
        got.add(generation.output_ids, generation.logprobs, generation.versions)
        got.moves.count(route, len(prompt), generation)
        if not again:
            got.cached_tokens = generation.cached_tokens
        if generation.finish != "abort":
            got.finish = generation.finish
        elif slot.revoked_at is None:  # ended by somebody else: look elsewhere before asking again
            self._router.suspect(route)

    async def _answer(
        self, job: Job, slot: Slot, task: asyncio.Future[Generation], arrived: _Arrived, got: Sampled
    ) -> Generation | None:
        """The engine's answer; None when it failed, with what had arrived already added to ``got``."""
        slot.request = task
        route = slot.route
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()  # does nothing to an answer; ends the request when this call is abandoned
        if task.cancelled():  # by the router: the engine would not end it
            got.add(arrived.ids, arrived.logprobs, [route.version] * len(arrived.ids))
            return None
        fault = task.exception()
        if fault is None:
            return task.result()
        if isinstance(fault, EngineRefused) and fault.status == 400:
            if "context length" in fault.message or "longer than" in fault.message:
                raise ContextExceeded(job.key.context_limit, len(job.prompt)) from fault
            raise BadRequest(f"the engine refused the request: {fault.message}") from fault
        if not isinstance(fault, EngineError):
            raise fault
        log.warning("%s failed request %s: %s", route.cell, slot.rid, fault)
        self._router.suspect(route)
        if isinstance(fault, EngineLost):
            got.add(fault.output_ids, fault.logprobs, fault.versions)
        else:
            got.resampled += len(arrived.ids)
        return None
