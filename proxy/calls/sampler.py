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
from proxy.calls.moved_prefixes import ComputedPrefix, PolicyKv
from proxy.calls.recorder import Recorder
from proxy.calls.running_call import RunningCall
from proxy.errors import BadRequest, ContextExceeded
from proxy.limits import Limits
from proxy.routing.router import Router
from proxy.routing.slot import Slot

log = logging.getLogger(__name__)
STREAM_FROM = 256
"""Turns that may be at least this long are streamed from the engine, so that a dead one loses nothing; for short
turns that costs more than sampling them again."""


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
        self, router: Router, recorder: Recorder, stop_token_ids: tuple[int, ...], limits: Limits, kv: PolicyKv
    ) -> None:
        self._router, self._recorder = router, recorder
        self._stops = stop_token_ids
        self._limits = limits
        self._kv = kv

    async def sample(self, call: RunningCall) -> None:
        """Sample the call's turn. Raises NoCell when no cell serves the call in time, ContextExceeded or BadRequest
        when engines refuse it."""
        if call.near:
            call.moved.at = ComputedPrefix(call.near, call.planned.kept)
        since = time.monotonic()
        deadline = since + self._limits.hold_s
        attempt = 0
        while not self._finished(call):
            prompt = call.planned.prompt + call.output_ids if call.output_ids else call.planned.prompt
            slot = Slot(
                f"{call.attempt.rid}.{attempt}",
                call.key.episode,
                call.key.min_version,
                call.key.max_version,
                near=call.near,
                tokens=len(prompt),
                seniority=call.seniority,
                since=since,
            )
            attempt += 1
            if not self._router.try_grant(slot):
                await self._hold(call, slot, deadline)
            try:
                await self._ask(call, slot, prompt)
            finally:
                self._router.release(slot)

    def _finished(self, call: RunningCall) -> bool:
        if not call.finish and call.output_ids:  # cut off at the very end
            if call.output_ids[-1] in self._stops:
                call.finish = "stop"
            elif len(call.output_ids) >= call.max_new_tokens:
                call.finish = "length"
        return bool(call.finish)

    async def _hold(self, call: RunningCall, slot: Slot, deadline: float) -> None:
        """Wait for the slot. Its seconds are credited whether or not it is granted."""
        episode, rid, since, granted = call.key.episode, call.attempt.rid, time.monotonic(), False
        await self._recorder.hold(episode, rid)
        try:
            await self._router.grant(slot, deadline)
            granted = True
        finally:
            held_s = time.monotonic() - since
            call.held_s += held_s
            try:
                await self._recorder.unhold(episode, rid, held_s)
            except BaseException:
                if granted:
                    self._router.release(slot)
                raise

    async def _ask(self, call: RunningCall, slot: Slot, prompt: array[int]) -> None:
        route, again = slot.route, bool(call.cells)
        since = time.monotonic()
        await call.moved.arrive(self._kv, route, prompt)
        call.hold(time.monotonic() - since)
        await self._recorder.open(
            call.key.episode, call.attempt.rid, cell=route.cell, engine_rid=slot.rid, digest=call.request.digest
        )
        if slot.revoked_at is not None:  # closed before the engine was asked
            return
        if route.cell not in call.cells[-1:]:
            call.cells.append(route.cell)
        arrived = _Arrived()
        left = call.max_new_tokens - len(call.output_ids)
        asked = time.monotonic()
        request = GenerateRequest(
            input_ids=prompt,
            rid=slot.rid,
            max_new_tokens=left,
            temperature=call.key.temperature,
            stop_token_ids=self._stops,
            version=route.version,
            weights=route.weights,
            on_tokens=arrived.add if left >= STREAM_FROM else None,
            deadline_s=self._limits.generate_s,
        )
        slot.request = asyncio.ensure_future(slot.engine.generate(request))
        generation = await self._answer(call, slot, slot.request, arrived)
        ended = time.monotonic()
        # Held: recomputing the prefix on another cell, and what passes between the closing and the answer.
        active_from = arrived.first_at if again and arrived.first_at else asked
        active_to = max(active_from, min(ended, slot.revoked_at or ended))
        call.active_s += active_to - active_from
        call.hold((active_from - asked) + (ended - active_to))
        if generation is None:
            return
        call.add(generation.output_ids, generation.logprobs, generation.versions)
        call.moved.count(route, len(prompt), generation)
        if not again:
            call.cached_tokens = generation.cached_tokens
        if generation.finish != "abort":
            call.finish = generation.finish
        elif slot.revoked_at is None:  # ended by somebody else: look elsewhere before asking again
            self._router.suspect(route)

    async def _answer(
        self, call: RunningCall, slot: Slot, request: asyncio.Future[Generation], arrived: _Arrived
    ) -> Generation | None:
        """The engine's answer; None when it failed, with what had arrived already added to the call."""
        route = slot.route
        try:
            await asyncio.wait({request})
        finally:
            request.cancel()  # does nothing to an answer; ends the request when this call is abandoned
        if request.cancelled():  # by the router: the engine would not end it
            call.add(arrived.ids, arrived.logprobs, [route.version] * len(arrived.ids))
            return None
        fault = request.exception()
        if fault is None:
            return request.result()
        if isinstance(fault, EngineRefused) and fault.status == 400:
            if "context length" in fault.message or "longer than" in fault.message:
                raise ContextExceeded(call.key.context_limit, len(call.planned.prompt)) from fault
            raise BadRequest(f"the engine refused the request: {fault.message}") from fault
        if not isinstance(fault, EngineError):
            raise fault
        log.warning("%s failed request %s: %s", route.cell, slot.rid, fault)
        self._router.suspect(route)
        if isinstance(fault, EngineLost):
            call.add(fault.output_ids, fault.logprobs, fault.versions)
        else:
            call.resampled += len(arrived.ids)
        return None
