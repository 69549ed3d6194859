"""A call from admission to its durable record: the order in which the parts of the proxy are asked.

Invariants. A turn is durable before anybody gets it. A call belongs to the episode, not to the connection that
asked for it: it goes on when the connection drops, and the same request finds it again. Between the search for an
earlier call and the registration of a new one there is no await, so a re-sent request cannot slip through.

It knows no dialect, and no HTTP beyond whether a connection is open.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from array import array
from collections import Counter
from dataclasses import dataclass

import redis.exceptions
from redis.asyncio import Redis

from infra.chat.messages import Message, ToolCall
from infra.chat.renderer import ChatMLRenderer
from proxy import notes
from proxy.auth import Keyring
from proxy.calls import ModelRequest, Turn
from proxy.episodes import Attempt, Connection, Episode, Episodes, attempt_key
from proxy.errors import Abandoned, CallsExceeded, ContextExceeded, KeyRefused, RecordsLost, Unavailable
from proxy.ledger import Ledger, Plan
from proxy.limits import Limits
from proxy.orphans import Orphans
from proxy.recorder import Recorder
from proxy.router import Router
from proxy.sampler import Job, Sampled, Sampler
from trajectory import records

log = logging.getLogger(__name__)
AWAY = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
"""Redis is restarting or out of reach."""


@dataclass(frozen=True)
class _Call:
    """A call while it runs."""

    episode: Episode
    attempt: Attempt
    name: bytes
    """Under which the attempt is found when the request is sent again."""
    request: ModelRequest
    agent: str
    plan: Plan
    job: Job


def _retrieved(turn: asyncio.Future[Turn]) -> None:
    """Mark a failure as seen: it was logged, and it may be that nobody waits for it."""
    if not turn.cancelled():
        turn.exception()


class Gateway:
    """Everything that one proxy process does, behind ``call``. Start the router before the first call."""

    def __init__(self, redis: Redis, renderer: ChatMLRenderer, router: Router, limits: Limits) -> None:
        self.limits = limits
        self.router = router
        self.counts: Counter[str] = Counter()
        self._renderer = renderer
        self._keyring = Keyring(redis)
        self._recorder = Recorder(redis, patience_s=limits.redis_s)
        self._episodes = Episodes(self._recorder, lambda: Ledger(renderer), idle_s=limits.idle_s)
        self._sampler = Sampler(router, self._recorder, renderer.stop_token_ids, limits)
        self._orphans = Orphans(redis, self._recorder, router, limits)
        self._tasks: dict[asyncio.Task[None], Attempt] = {}

    async def stop(self) -> None:
        """Abandon what is running. Its harnesses will ask again, another proxy or the next one."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._orphans.stop()

    async def call(self, secret: str, request: ModelRequest, agent: str, connection: Connection) -> Attempt:
        """The call for a request: a new one, or the one that the same request began earlier.

        Raises a GatewayError for what is refused at once; later failures are in the attempt's future.
        """
        try:
            return await self._call(secret, request, agent, connection)
        except AWAY as fault:
            raise Unavailable("the gateway's state is out of reach") from fault

    async def _call(self, secret: str, request: ModelRequest, agent: str, connection: Connection) -> Attempt:
        admission = await self._keyring.admit(secret)
        key = admission.key
        episode = await self._episodes.get(key.episode, admission.calls)
        if not episode.swept:
            await self._orphans.sweep(episode)
        name = attempt_key(agent, request.digest)
        attempt = episode.repeated(name, key.generation)
        if attempt is not None:
            self.counts["repeated"] += 1
            attempt.connections.add(connection)
            return attempt
        if len(episode.ledger.turns) + episode.running >= key.max_calls:
            await self._recorder.truncate(key.episode, "calls")
            raise CallsExceeded(f"{key.max_calls} calls were allowed")
        plan = episode.ledger.plan(request.messages, request.tools)
        room = key.context_limit - len(plan.prompt)
        if room < 1:
            await self._recorder.truncate(key.episode, "context")
            raise ContextExceeded(key.context_limit, len(plan.prompt))
        rid = f"{self.router.proxy_id}.{secrets.token_hex(8)}"
        attempt = Attempt(rid, key.generation, asyncio.get_running_loop().create_future(), {connection})
        attempt.turn.add_done_callback(_retrieved)
        episode.attempts.setdefault(name, []).append(attempt)
        parent = episode.ledger.delta(plan).parent
        near = episode.cells[parent] if parent >= 0 else ""
        job = Job(
            rid, request.digest, key, plan.prompt, min(key.max_new_tokens, room, request.max_tokens or room), near
        )
        call = _Call(episode, attempt, name, request, agent, plan, job)
        episode.running += 1
        self._tasks[asyncio.get_running_loop().create_task(self._run(call))] = attempt
        return attempt

    def status(self) -> dict[str, object]:
        """What this proxy is doing, for people and health checks."""
        routes = {
            cell: {"open": route.open, "version": route.version, "requests": self.router.load(cell)}
            for cell, route in self.router.routes.items()
        }
        running = {"running": len(self._tasks), "held": self.router.waiting}
        return {"proxy": self.router.proxy_id, "routes": routes, **running, "counts": dict(self.counts)}

    def left(self, attempt: Attempt) -> None:
        """A request stopped waiting for its turn. If none comes back in time, the call is aborted."""
        if attempt.waiting == 0 and not attempt.turn.done():
            attempt.left_at = time.monotonic()
            asyncio.get_running_loop().call_later(self.limits.abandon_s, self._abandon, attempt, attempt.left_at)

    def _abandon(self, attempt: Attempt, left_at: float) -> None:
        if attempt.waiting == 0 and attempt.left_at == left_at:
            for task in [task for task, running in self._tasks.items() if running is attempt]:
                task.cancel()

    async def _run(self, call: _Call) -> None:
        started_at = time.time()
        attempt, episode = call.attempt, call.episode
        try:
            sampled = await self._sampler.sample(call.job)
            turn = await self._record(call, sampled, started_at)
        except asyncio.CancelledError:
            await self._failed(call, Abandoned("nobody waited for the turn"))
            raise
        except AWAY as fault:
            log.warning("call %s of %s failed: %r", attempt.rid, episode.name, fault)
            await self._failed(call, Unavailable("the gateway's state is out of reach"))
        except Exception as fault:  # whoever waits for the turn gets it
            log.warning("call %s of %s failed: %r", attempt.rid, episode.name, fault)
            await self._failed(call, fault)
        else:
            attempt.turn.set_result(turn)
        finally:
            episode.running -= 1
            episode.used_at = time.monotonic()
            task = asyncio.current_task()
            if task is not None:
                del self._tasks[task]

    async def _failed(self, call: _Call, fault: Exception) -> None:
        call.episode.forget(call.name, call.attempt)
        call.attempt.turn.set_exception(fault)
        await self._recorder.drop(call.episode.name, call.attempt.rid)

    async def _record(self, call: _Call, sampled: Sampled, started_at: float) -> Turn:
        """Make the turn durable; returns it as it is delivered."""
        episode, attempt, plan = call.episode, call.attempt, call.plan
        message = self._message(sampled.output_ids)
        output_ids = array("i", sampled.output_ids)
        finish = sampled.finish
        if finish == "length" and len(plan.prompt) + len(output_ids) >= call.job.key.context_limit:
            finish = "context"
        turn = Turn(
            response_id=f"chatcmpl-{secrets.token_hex(12)}",
            created=int(started_at),
            message=message,
            finish_reason=finish,
            prompt_tokens=len(plan.prompt),
            output_tokens=len(output_ids),
            cached_tokens=sampled.cached_tokens,
        )
        async with episode.lock:
            sampled.resampled += episode.lost.pop(call.request.digest, 0)
            while True:
                data, note = self._encode(call, sampled, turn, started_at)
                outcome = await self._recorder.append(
                    episode.name,
                    seq=len(episode.ledger.turns),
                    generation=call.job.key.generation,
                    rid=attempt.rid,
                    record=data,
                    note=note,
                    held_s=sampled.uncredited_s,
                )
                if outcome == "appended":
                    attempt.node = episode.ledger.commit(plan, message, output_ids)
                    episode.tail = records.record_hash(data)
                    episode.cells.append(sampled.cells[-1])
                    episode.forget_acknowledged()
                    break
                if outcome == "generation":
                    raise KeyRefused("it belongs to an older generation of its episode")
                if outcome == "lost":
                    raise RecordsLost(f"records of {episode.name} have been lost")
                found = [read for read in await self._episodes.catch_up(episode) if read.rid == attempt.rid]
                if found:  # an earlier try of this append was cut off after it took effect
                    episode.forget(call.name, found[0])
                    attempt.node = found[0].node
                    turn = found[0].turn.result()
                    break
        self.counts["calls"] += 1
        self.counts["mutated"] += plan.mutated
        self.counts["synthetic"] += plan.synthetic
        self.counts["resampled"] += sampled.resampled
        return turn

    @staticmethod
    def _encode(call: _Call, sampled: Sampled, turn: Turn, started_at: float) -> tuple[bytes, bytes]:
        """Record and note of a call as the next one of its episode."""
        delta = call.episode.ledger.delta(call.plan)
        record = records.make_record(
            episode=call.episode.name,
            seq=len(call.episode.ledger.turns),
            prev=call.episode.tail,
            agent=call.agent,
            parent=delta.parent,
            kept=delta.kept,
            prompt_ids=delta.prompt_ids,
            output_ids=sampled.output_ids,
            logprobs=sampled.logprobs,
            versions=sampled.versions,
            temperature=call.job.key.temperature,
            finish_reason=turn.finish_reason,
            cells=sampled.cells,
            started_at=started_at,
            active_s=sampled.active_s,
            held_s=sampled.held_s,
            resampled=sampled.resampled,
            mutated=call.plan.mutated,
            synthetic=call.plan.synthetic,
        )
        note = notes.TurnNote(
            rid=call.attempt.rid,
            digest=call.request.digest,
            response_id=turn.response_id,
            cached_tokens=turn.cached_tokens,
            depth=delta.depth,
            nodes=delta.nodes,
            message=notes.note_of(turn.message),
            asked=call.request.asked,
        )
        return records.encode(record), notes.encode(note)

    def _message(self, output_ids: list[int]) -> Message:
        """The turn as the harness gets it. Each tool call gets an unguessable id by which it is recognised later."""
        parsed = self._renderer.parse(output_ids)
        calls = tuple(
            ToolCall(id=f"call_{secrets.token_urlsafe(18)}", name=call.name, arguments=call.arguments)
            for call in parsed.calls
        )
        self.counts["malformed"] += parsed.malformed
        return Message(role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=calls)
