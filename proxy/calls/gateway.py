"""A call from its key to its durable record: the order in which the parts of the proxy are asked.

The way of a request, with the types that carry it:

| where | what happens | type |
|---|---|---|
| `app` → `Gateway.call` | the key is known; only then is the body read | |
| `dialects` | the body is read: one message model for all | `ModelRequest`, with `Hints` |
| `auth`, `episodes` | the key is admitted; the episode is loaded; a re-sent request ends here | `Attempt` |
| `Ledger.plan` | matched, placed by the lineage, tokenised | `PlannedCall`, with `Place` |
| `Gateway._begin` | registered; from here on it needs no connection | `RunningCall` |
| `sampler` → `router` | an engine is chosen, or waited for | `Slot` |
| `sampler` → `engine` | sampled, on as many engines as it takes | `GenerateRequest`, `Generation` |
| `turn_record` → `recorder` | durable, and part of the ledger | `CallRecord` |

A `Turn` goes back. Forms in Redis are made and read where they are stored: `EpisodeKey`, `OpenCall`, `LeftCall`,
`StoredTurn`.

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
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import msgspec
import redis.exceptions
from redis.asyncio import Redis

from infra.chat.renderer import Renderer
from infra.state.keys import EpisodeKey
from proxy.auth import Keyring
from proxy.calls.episodes import Attempt, Connection, Episode, Episodes
from proxy.calls.moved_prefixes import PolicyKv
from proxy.calls.orphans import Orphans
from proxy.calls.recorder import LeftCall, Recorder
from proxy.calls.running_call import RunningCall
from proxy.calls.sampler import Sampler
from proxy.calls.turn_record import record_of, stored_turn, turn_of
from proxy.conversation import stored_turns
from proxy.conversation.ledger import Ledger, PlannedCall
from proxy.conversation.requests import ModelRequest, Turn
from proxy.errors import Abandoned, BadRequest, CallsExceeded, ContextExceeded, KeyRefused, RecordsLost, Unavailable
from proxy.limits import Limits
from proxy.routing.router import Router
from proxy.routing.tasks import Tasks, end
from trajectory import records

log = logging.getLogger(__name__)
AWAY = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
"""Redis is restarting or out of reach."""
COUNTED = ("malformed", "mutated", "synthetic", "partial", "resampled")
COUNTED_MOVES = ("moved_tokens", "moved_from_store", "moved_recomputed", "moved_bytes")
PATIENCE_SHARE = 0.9
"""Of a harness's patience, for which an answer without a stream is held at most."""

Read = Callable[[], Awaitable[ModelRequest]]
"""Reads the request, whose body is still on its way. May raise BadRequest."""


@contextmanager
def _within_reach() -> Iterator[None]:
    try:
        yield
    except AWAY as fault:
        raise Unavailable("the gateway's state is out of reach") from fault


def _retrieved(turn: asyncio.Future[Turn]) -> None:
    """Mark a failure as seen: it was logged, and it may be that nobody waits for it."""
    if not turn.cancelled():
        turn.exception()


class Gateway:
    """Everything that one proxy process does, behind ``call``. Start the router before the first call."""

    def __init__(
        self, redis: Redis, renderer: Renderer, router: Router, limits: Limits, kv: PolicyKv | None = None
    ) -> None:
        self.limits = limits
        self.router = router
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Of each harness."""
        self._renderer = renderer
        self._keyring = Keyring(redis)
        self._recorder = Recorder(redis, router.proxy_id, patience_s=limits.redis_s)
        self._episodes = Episodes(self._recorder, lambda: Ledger(renderer), idle_s=limits.idle_s)
        self._kv = kv or PolicyKv()
        self._sampler = Sampler(router, self._recorder, renderer.stop_token_ids, limits, self._kv)
        self._orphans = Orphans(self._recorder, router, limits, self._load)
        self._running: dict[asyncio.Task[None], RunningCall] = {}
        self._background = Tasks()
        router.on_peer_gone = self._orphans.peer_gone

    async def stop(self) -> None:
        """Abandon what is running. Its harnesses will ask again, another proxy or the next one."""
        await end([*self._running, *self._background])
        await self._orphans.stop()
        await self._kv.close()

    def status(self) -> dict[str, object]:
        """What this proxy is doing, for people and health checks."""
        routes = {
            cell: {"open": route.open, "version": route.version, "requests": self.router.load(cell)}
            for cell, route in self.router.routes.items()
        }
        running = {"running": len(self._running), "held": self.router.waiting, "hold_s": self.limits.hold_s}
        return {"proxy": self.router.proxy_id, "routes": routes, **running, "counts": self.counts}

    # The way in

    async def call(self, secret: str, read: Read, connection: Connection) -> tuple[ModelRequest, Attempt]:
        """A request, and its call: a new one, or the one that the same request began earlier. The connection waits for
        its turn until ``answered``.

        Raises a GatewayError for what is refused at once; later failures are in the attempt's future.
        """
        with _within_reach():
            request, key, episode, elsewhere = await self._admit(secret, read)
            attempt = episode.repeated(request.name, key.generation)
            if request.begun is not None and (attempt is None or attempt.head.turn_id != request.begun.turn_id):
                raise BadRequest("the last message must not be from the assistant: prefill is not supported")
            if attempt is not None:
                await self._repeat(episode, key, request, attempt, connection)
            else:
                planned = await self._plan(episode, key, request)  # waits only where it refuses
                attempt = self._begin(episode, key, request, planned, elsewhere)
                attempt.connections.add(connection)
        attempt.waiting += 1
        return request, attempt

    async def count_tokens(self, secret: str, read: Read) -> int:
        """Prompt tokens that a request would have. Nothing is recorded."""
        with _within_reach():
            request, _, episode, _ = await self._admit(secret, read)
        return len(episode.ledger.plan(request).prompt)

    async def _admit(self, secret: str, read: Read) -> tuple[ModelRequest, EpisodeKey, Episode, LeftCall | None]:
        """Refuse an unknown key before anything of its request is read. Also returns the same call in another proxy,
        whose connection has closed."""
        await self._keyring.known(secret)
        request = await read()
        key, calls, left = await self._keyring.admit(secret, request.name)
        episode = await self._load(key.episode, calls)
        elsewhere = None if left is None else msgspec.json.decode(left, type=LeftCall)
        if elsewhere is not None and elsewhere.proxy == self.router.proxy_id:
            elsewhere = None  # it failed here meanwhile
        return request, key, episode, elsewhere

    async def _load(self, name: str, calls: int = -1) -> Episode:
        episode = await self._episodes.get(name, calls)
        if not episode.swept:
            await self._orphans.sweep(episode)
        return episode

    async def _repeat(
        self, episode: Episode, key: EpisodeKey, request: ModelRequest, attempt: Attempt, connection: Connection
    ) -> None:
        """A request was sent again: it joins the call that runs, or gets the turn that was recorded."""
        attempt.connections.add(connection)  # before anything is awaited: a third request is a parallel one
        self._suit(attempt, key)
        if attempt.turn.done():
            self.counts[key.harness]["replayed"] += 1
            await self._recorder.count_up(episode.name, "replayed")
        else:
            self.counts[key.harness]["joined"] += 1
            await self._recorder.forget_left(episode.name, request.name)

    async def _plan(self, episode: Episode, key: EpisodeKey, request: ModelRequest) -> PlannedCall:
        if len(episode.ledger.turns) + episode.running >= key.max_calls:
            await self._recorder.truncate(key.episode, "calls")
            raise CallsExceeded(f"{key.max_calls} calls were allowed")
        running = [call.planned.place.agent for call in self._running.values() if call.episode is episode]
        planned = episode.ledger.plan(request, running)
        if len(planned.prompt) >= key.context_limit:
            await self._recorder.truncate(key.episode, "context")
            raise ContextExceeded(key.context_limit, len(planned.prompt))
        return planned

    def _begin(
        self,
        episode: Episode,
        key: EpisodeKey,
        request: ModelRequest,
        planned: PlannedCall,
        elsewhere: LeftCall | None,
    ) -> Attempt:
        planned.acknowledge()
        if elsewhere is None:
            head = Turn(secrets.token_urlsafe(18), int(time.time()), len(planned.prompt))
        else:
            head = Turn(elsewhere.turn_id, elsewhere.created, elsewhere.prompt_tokens)
        loop = asyncio.get_running_loop()
        rid = f"{self.router.proxy_id}.{secrets.token_hex(8)}"
        attempt = Attempt(rid, key.generation, head, loop.create_future())
        self._suit(attempt, key)
        attempt.turn.add_done_callback(_retrieved)
        episode.remember(request.name, attempt)
        call = RunningCall(
            episode=episode,
            attempt=attempt,
            key=key,
            request=request,
            planned=planned,
            near=episode.cells[planned.parent] if planned.parent >= 0 else "",
            seniority=len(episode.ledger.turns),
            elsewhere="" if elsewhere is None else elsewhere.proxy,
            started_at=time.time(),
        )
        episode.running += 1
        self._running[loop.create_task(self._run(call))] = call
        for disagreement in planned.place.disagreements:
            log.warning("call %s of %s: %s", rid, episode.name, disagreement)
        return attempt

    def _suit(self, attempt: Attempt, key: EpisodeKey) -> None:
        """How the harness wants to be answered."""
        attempt.answer_s = min(self.limits.answer_s, PATIENCE_SHARE * key.patience_s)
        attempt.early_stream = key.early_stream

    # When nobody waits any more

    def answered(self, attempt: Attempt, connection: Connection, *, delivered: bool) -> None:
        """A connection stopped waiting. A call for which no other waits is offered to other proxies, and aborted if
        nobody comes back for it in time."""
        attempt.waiting -= 1
        if delivered:
            attempt.deliveries += 1
        else:
            attempt.connections.discard(connection)  # it may be kept alive, but it got nothing
        if not attempt.waiting and not attempt.turn.done():
            attempt.left_at = time.monotonic()
            call = next(call for call in self._running.values() if call.attempt is attempt)
            self._background.start(self._leave(call, attempt.left_at))

    async def _leave(self, call: RunningCall, left_at: float) -> None:
        """Offer the call to other proxies; abort it when nobody has come back for it, to any of them, in time."""
        attempt, episode, name = call.attempt, call.episode.name, call.request.name
        try:
            await self._recorder.leave(episode, name, attempt.head)
            if attempt.turn.done() or attempt.waiting:
                await self._recorder.forget_left(episode, name)
            while not attempt.turn.done() and not attempt.waiting and attempt.left_at == left_at:
                since = time.time() - await self._recorder.wanted_at(episode, name)
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

    # A call by itself

    async def _run(self, call: RunningCall) -> None:
        attempt, episode = call.attempt, call.episode
        try:
            turn = await self._recorded_elsewhere(call) if call.elsewhere else None
            if turn is None:
                await self._sampler.sample(call)
                turn = await self._record(call)
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

    async def _failed(self, call: RunningCall, fault: Exception) -> None:
        call.episode.forget(call.request.name, call.attempt)
        call.attempt.turn.set_exception(fault)
        await self._recorder.drop(call.episode.name, call.attempt.rid, call.request.name)

    async def _recorded_elsewhere(self, call: RunningCall) -> Turn | None:
        """The turn of the same call in another proxy; None when it is to be sampled here."""
        episode, name = call.episode, call.request.name
        other = await self._episodes.recorded_elsewhere(episode, name, call.elsewhere, self.limits.hold_s)
        if other is None:
            return None
        self.counts[call.key.harness]["replayed"] += 1
        await self._recorder.count_up(episode.name, "replayed")
        return self._take_over(call, other)

    @staticmethod
    def _take_over(call: RunningCall, recorded: Attempt) -> Turn:
        """The call's turn is one that was read from its record."""
        call.episode.forget(call.request.name, recorded)
        call.attempt.node = recorded.node
        return recorded.turn.result()

    async def _record(self, call: RunningCall) -> Turn:
        """Make the turn durable; returns it as it is delivered."""
        episode, attempt = call.episode, call.attempt
        parsed = self._renderer.parse(call.output_ids)
        turn = turn_of(call, parsed)
        async with episode.lock:
            call.resampled += episode.lost.pop(call.request.digest, 0)
            while True:
                planned = episode.ledger.refreshed(call.planned)
                record = record_of(call, planned, turn, malformed=parsed.malformed, kv_token_bytes=self._kv.token_bytes)
                stored = stored_turn(call, planned, turn)
                data = records.encode(record)
                outcome = await self._recorder.append(
                    episode.name,
                    seq=record.seq,
                    generation=call.key.generation,
                    rid=attempt.rid,
                    name=call.request.name,
                    record=data,
                    stored=stored_turns.encode(stored),
                    held_s=call.uncredited_s,
                )
                if outcome == "appended":
                    attempt.node = episode.ledger.commit(planned, record, stored)
                    episode.tail = records.record_hash(data)
                    episode.cells.append(call.cells[-1])
                    episode.forget_acknowledged()
                    break
                if outcome == "generation":
                    raise KeyRefused("it belongs to an older generation of its episode")
                if outcome == "lost":
                    raise RecordsLost(f"records of {episode.name} have been lost")
                others = await self._episodes.catch_up(episode)
                if (own := next((read for read in others if read.rid == attempt.rid), None)) is not None:
                    turn = self._take_over(call, own)  # an earlier try was cut off after it took effect
                    break
        await self._count(call, record)
        return turn

    async def _count(self, call: RunningCall, record: records.CallRecord) -> None:
        counts, disagreements = self.counts[call.key.harness], len(call.planned.place.disagreements)
        counts["calls"] += 1
        for figure in (*COUNTED, *COUNTED_MOVES):
            counts[figure] += getattr(record, figure)
        if record.fork:
            counts[f"fork.{record.fork}"] += 1
        if disagreements:
            counts["disagreements"] += disagreements
            await self._recorder.count_up(call.episode.name, "disagreements", disagreements)
