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
from collections import Counter, defaultdict

import msgspec
import redis.exceptions
from redis.asyncio import Redis

from infra.chat.renderer import Renderer
from infra.state.keys import EpisodeKey
from proxy.auth import Keyring
from proxy.calls.episodes import Attempt, Connection, Episode, Episodes
from proxy.calls.moved_prefixes import Kv
from proxy.calls.orphans import Orphans
from proxy.calls.other_process import Foreign
from proxy.calls.recorder import LeftCall, Recorder
from proxy.calls.sampler import Job, Sampled, Sampler
from proxy.calls.turn_record import Call, turn_of, write
from proxy.conversation.ledger import Ledger, Plan
from proxy.conversation.requests import ModelRequest, Opening, Turn, attempt_name
from proxy.errors import Abandoned, BadRequest, CallsExceeded, ContextExceeded, KeyRefused, RecordsLost, Unavailable
from proxy.limits import Limits
from proxy.routing.router import Router
from proxy.routing.tasks import Tasks, end
from trajectory import records

log = logging.getLogger(__name__)
AWAY = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
"""Redis is restarting or out of reach."""
MOVED = ("moved_tokens", "moved_from_store", "moved_recomputed", "moved_bytes")
PATIENCE_SHARE = 0.9
"""Of a harness's patience, for which an answer without a stream is held at most."""


def _retrieved(turn: asyncio.Future[Turn]) -> None:
    """Mark a failure as seen: it was logged, and it may be that nobody waits for it."""
    if not turn.cancelled():
        turn.exception()


class Gateway:
    """Everything that one proxy process does, behind ``call``. Start the router before the first call."""

    def __init__(self, redis: Redis, renderer: Renderer, router: Router, limits: Limits, kv: Kv | None = None) -> None:
        self.limits = limits
        self.router = router
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Of each harness."""
        self._renderer = renderer
        self._keyring = Keyring(redis)
        self._recorder = Recorder(redis, router.proxy_id, patience_s=limits.redis_s)
        self._episodes = Episodes(self._recorder, lambda: Ledger(renderer), idle_s=limits.idle_s)
        self._foreign = Foreign(self._recorder, self._episodes, limits)
        self._kv = kv or Kv()
        self._sampler = Sampler(router, self._recorder, renderer.stop_token_ids, limits, self._kv)
        self._orphans = Orphans(self._recorder, router, limits, self._load)
        self._running: dict[asyncio.Task[None], Call] = {}
        self._background = Tasks()
        router.on_peer_gone = self._orphans.peer_gone

    async def stop(self) -> None:
        """Abandon what is running. Its harnesses will ask again, another proxy or the next one."""
        await end([*self._running, *self._background])
        await self._orphans.stop()
        await self._kv.close()

    async def check(self, secret: str) -> None:
        """Refuse an unknown key before anything of its request is read. Raises KeyRefused."""
        try:
            await self._keyring.known(secret)
        except AWAY as fault:
            raise Unavailable("the gateway's state is out of reach") from fault

    async def call(self, secret: str, request: ModelRequest, connection: Connection) -> Attempt:
        """The call for a request: a new one, or the one that the same request began earlier.

        Raises a GatewayError for what is refused at once; later failures are in the attempt's future.
        """
        try:
            return await self._call(secret, request, connection)
        except AWAY as fault:
            raise Unavailable("the gateway's state is out of reach") from fault

    async def count_tokens(self, secret: str, request: ModelRequest) -> int:
        """Prompt tokens that a request would have. Nothing is recorded."""
        try:
            admission = await self._keyring.admit(secret, b"")
            episode = await self._episodes.get(admission.key.episode, admission.calls)
        except AWAY as fault:
            raise Unavailable("the gateway's state is out of reach") from fault
        return len(episode.ledger.plan(request).prompt)

    async def _call(self, secret: str, request: ModelRequest, connection: Connection) -> Attempt:
        name = attempt_name(request)
        admission = await self._keyring.admit(secret, name)
        key = admission.key
        episode = await self._load(key.episode, admission.calls)
        attempt = episode.repeated(name, key.generation)
        if request.begun is not None and (attempt is None or attempt.opening.turn_id != request.begun.turn_id):
            raise BadRequest("the last message must not be from the assistant: prefill is not supported")
        if attempt is not None:
            await self._repeat(episode, name, key, attempt, connection)
            return attempt
        if len(episode.ledger.turns) + episode.running >= key.max_calls:
            await self._recorder.truncate(key.episode, "calls")
            raise CallsExceeded(f"{key.max_calls} calls were allowed")
        plan = episode.ledger.plan(request)
        room = key.context_limit - len(plan.prompt)
        if room < 1:
            await self._recorder.truncate(key.episode, "context")
            raise ContextExceeded(key.context_limit, len(plan.prompt))
        left = None if admission.left is None else msgspec.json.decode(admission.left, type=LeftCall)
        if left is not None and left.proxy == self.router.proxy_id:
            left = None  # it failed here meanwhile
        return self._begin(episode, request, plan, key=key, left=left, connection=connection)

    def _begin(
        self,
        episode: Episode,
        request: ModelRequest,
        plan: Plan,
        *,
        key: EpisodeKey,
        left: LeftCall | None,
        connection: Connection,
    ) -> Attempt:
        episode.ledger.acknowledge(plan)
        running = [call.place.agent for call in self._running.values() if call.episode is episode]
        place = episode.lineage.place(request, plan.turns, plan.synthetic_after, running=running)
        loop = asyncio.get_running_loop()
        if left is None:
            opening = Opening(secrets.token_urlsafe(18), int(time.time()), len(plan.prompt))
        else:
            opening = Opening(left.turn_id, left.created, left.prompt_tokens)
        rid = f"{self.router.proxy_id}.{secrets.token_hex(8)}"
        attempt = Attempt(rid, key.generation, opening, loop.create_future(), {connection})
        self._suit(attempt, key)
        attempt.turn.add_done_callback(_retrieved)
        name = attempt_name(request)
        episode.attempts.setdefault(name, []).append(attempt)
        delta = episode.ledger.delta(episode.ledger.refreshed(plan))
        near = episode.cells[delta.parent] if delta.parent >= 0 else ""
        room = key.context_limit - len(plan.prompt)
        most = min(key.max_new_tokens, room, request.max_tokens or room)
        seniority = len(episode.ledger.turns)
        job = Job(rid, request.digest, key, plan.prompt, most, near, kept=delta.kept, seniority=seniority)
        call = Call(episode, attempt, name, request, plan, place, job, left, time.time())
        episode.running += 1
        self._running[loop.create_task(self._run(call))] = call
        for disagreement in place.disagreements:
            log.warning("call %s of %s: %s", rid, episode.name, disagreement)
        return attempt

    async def _load(self, name: str, calls: int = -1) -> Episode:
        episode = await self._episodes.get(name, calls)
        if not episode.swept:
            await self._orphans.sweep(episode)
        return episode

    def _suit(self, attempt: Attempt, key: EpisodeKey) -> None:
        """How the harness wants to be answered."""
        attempt.answer_s = min(self.limits.answer_s, PATIENCE_SHARE * key.patience_s)
        attempt.early_stream = key.early_stream

    async def _repeat(
        self, episode: Episode, name: bytes, key: EpisodeKey, attempt: Attempt, connection: Connection
    ) -> None:
        """A request was sent again: it joins the call that runs, or gets the turn that was recorded."""
        attempt.connections.add(connection)  # before anything is awaited: a third request is a parallel one
        self._suit(attempt, key)
        if attempt.turn.done():
            self.counts[key.harness]["replayed"] += 1
            await self._recorder.count_up(episode.name, "replayed")
        else:
            self.counts[key.harness]["joined"] += 1
            await self._recorder.forget_left(episode.name, name)

    def status(self) -> dict[str, object]:
        """What this proxy is doing, for people and health checks."""
        routes = {
            cell: {"open": route.open, "version": route.version, "requests": self.router.load(cell)}
            for cell, route in self.router.routes.items()
        }
        running = {"running": len(self._running), "held": self.router.waiting, "hold_s": self.limits.hold_s}
        return {"proxy": self.router.proxy_id, "routes": routes, **running, "counts": self.counts}

    def left(self, attempt: Attempt) -> None:
        """A request stopped waiting for its turn. If none comes back in time, the call is aborted."""
        if attempt.waiting or attempt.turn.done():
            return
        attempt.left_at = time.monotonic()
        call = next(call for task, call in self._running.items() if call.attempt is attempt)
        self._background.start(self._leave(call, attempt.left_at))

    async def _leave(self, call: Call, left_at: float) -> None:
        """Offer the call to other proxies; abort it when nobody has come back for it, to any of them, in time."""
        attempt, episode = call.attempt, call.episode.name
        opening = attempt.opening
        note = LeftCall(self.router.proxy_id, opening.turn_id, opening.created, opening.prompt_tokens)
        try:
            await self._recorder.leave(episode, call.name, note)
            if attempt.turn.done() or attempt.waiting:
                await self._recorder.forget_left(episode, call.name)
            while not attempt.turn.done() and not attempt.waiting and attempt.left_at == left_at:
                since = time.time() - await self._recorder.wanted_at(episode, call.name)
                if time.monotonic() - left_at >= self.limits.abandon_s and since >= self.limits.abandon_s:
                    self._abandon(attempt)
                    return
                patience = self.limits.abandon_s - min(time.monotonic() - left_at, since)
                await asyncio.wait({attempt.turn}, timeout=max(patience, 0.01))
        except AWAY as fault:
            log.warning("call %s of %s was left while Redis is away: %s", attempt.rid, episode, fault)
            await asyncio.wait({attempt.turn}, timeout=self.limits.abandon_s)
            if not attempt.waiting and attempt.left_at == left_at:  # else somebody came back for it
                self._abandon(attempt)

    def _abandon(self, attempt: Attempt) -> None:
        for task in [task for task, call in self._running.items() if call.attempt is attempt]:
            task.cancel()

    async def _run(self, call: Call) -> None:
        attempt, episode = call.attempt, call.episode
        try:
            turn = await self._elsewhere(call) if call.left is not None else None
            if turn is None:
                turn = await self._record(call, await self._sampler.sample(call.job))
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
                del self._running[task]

    async def _failed(self, call: Call, fault: Exception) -> None:
        call.episode.forget(call.name, call.attempt)
        call.attempt.turn.set_exception(fault)
        await self._recorder.drop(call.episode.name, call.attempt.rid, call.name)

    async def _elsewhere(self, call: Call) -> Turn | None:
        """The turn of the same call in another proxy; None when it is to be sampled here."""
        assert call.left is not None
        found = await self._foreign.turn_of(call.episode, call.name, call.left)
        if found is None:
            return None
        call.episode.forget(call.name, found)
        call.attempt.node = found.node
        self.counts[call.job.key.harness]["replayed"] += 1
        await self._recorder.count_up(call.episode.name, "replayed")
        return found.turn.result()

    async def _record(self, call: Call, sampled: Sampled) -> Turn:
        """Make the turn durable; returns it as it is delivered."""
        episode, attempt, key = call.episode, call.attempt, call.job.key
        said = turn_of(call, sampled, self._renderer.parse(sampled.output_ids))
        turn = said.turn
        async with episode.lock:
            sampled.resampled += episode.lost.pop(call.request.digest, 0)
            while True:
                plan = episode.ledger.refreshed(call.plan)
                delta = episode.ledger.delta(plan)
                record, data, note = write(call, plan, delta, sampled, said, kv_token_bytes=self._kv.token_bytes)
                outcome = await self._recorder.append(
                    episode.name,
                    seq=record.seq,
                    generation=key.generation,
                    rid=attempt.rid,
                    name=call.name,
                    record=data,
                    note=note,
                    held_s=sampled.uncredited_s,
                )
                if outcome == "appended":
                    attempt.node = episode.ledger.commit(plan, turn.message, said.output_ids)
                    episode.lineage.observe(record, delta.messages, turn.message, call.name)
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
        counts = self.counts[key.harness]
        counts["calls"] += 1
        for what in ("malformed", "mutated", "synthetic", "partial", "resampled", *MOVED):
            counts[what] += getattr(record, what)
        if record.fork:
            counts[f"fork.{record.fork}"] += 1
        if call.place.disagreements:
            counts["disagreements"] += len(call.place.disagreements)
            await self._recorder.count_up(episode.name, "disagreements", len(call.place.disagreements))
        return turn
