"""What a proxy remembers of each episode: its ledger, the end of its record chain, and calls to answer again.

All of it can be rebuilt from Redis; an episode is loaded when its first call arrives, and what other proxies have
appended since is read before each call is matched. An episode that is idle is forgotten.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.calls.recorder import Recorder
from proxy.conversation.ledger import Ledger
from proxy.conversation.requests import Turn
from proxy.conversation.stored_turns import decode, message_of
from proxy.conversation.tree import Node
from proxy.errors import RecordsLost
from trajectory import records

POLL_S = 0.2


@dataclass(eq=False)
class Connection:
    """One client connection. ``closed`` is set by the HTTP protocol."""

    closed: bool = False


@dataclass(eq=False)
class Attempt:
    """One call for those who wait for it, from its arrival to its acknowledgement: being sampled, or recorded and not
    yet used."""

    rid: str
    generation: int
    """Of the key that asked for it; an unrecorded call of an older generation will never be recorded."""
    head: Turn
    """The turn as far as it is known before it is sampled."""
    turn: asyncio.Future[Turn]
    connections: set[Connection] = field(default_factory=set)
    """Connections that wait for it or got it."""
    waiting: int = 0
    """Requests that wait for it now."""
    deliveries: int = 0
    """How often it was delivered whole."""
    answer_s: float = 540.0
    """How long a request without a stream waits for the turn before it is told to ask again."""
    early_stream: bool = True
    """A stream may be opened before the turn is there."""
    left_at: float = 0.0
    """Monotonic time at which the last request stopped waiting."""
    node: Node | None = None
    """The recorded turn."""

    @property
    def acknowledged(self) -> bool:
        return self.node is not None and self.node.acknowledged

    @property
    def repeatable(self) -> bool:
        """Whether a request that is sent again gets this turn instead of a new sample.

        A connection that is still open means a second, parallel request. A turn that was delivered whole twice is
        not given a third time: a harness that asks again and again wants another sample.
        """
        lost = all(connection.closed for connection in self.connections)
        return lost and not self.acknowledged and self.deliveries < 2


@dataclass(eq=False)
class Episode:
    name: str
    ledger: Ledger
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while records are read or appended; never while a turn is sampled."""
    tail: str = records.FIRST_HASH
    cells: list[str] = field(default_factory=list)
    """The cell that finished each call."""
    attempts: dict[bytes, list[Attempt]] = field(default_factory=dict)
    """By ``ModelRequest.name``."""
    lost: Counter[bytes] = field(default_factory=Counter)
    """Request digest -> generations of it that died with a proxy, unrecorded."""
    swept: bool = False
    """Calls left open by dead proxies have been looked for."""
    running: int = 0
    used_at: float = field(default_factory=time.monotonic)

    def remember(self, name: bytes, attempt: Attempt) -> None:
        self.attempts.setdefault(name, []).append(attempt)

    def repeated(self, name: bytes, generation: int) -> Attempt | None:
        """The call that a re-sent request joins or gets replayed, if any; the latest if there are several."""
        for attempt in reversed(self.attempts.get(name, [])):
            if attempt.repeatable and (attempt.node is not None or attempt.generation == generation):
                return attempt
        return None

    def offered(self, name: bytes) -> Attempt | None:
        """A recorded turn of another proxy that nobody here has got yet."""
        offers = [attempt for attempt in self.attempts.get(name, []) if attempt.generation < 0 and attempt.repeatable]
        return offers[-1] if offers else None

    def forget_acknowledged(self) -> None:
        for name, attempts in list(self.attempts.items()):
            attempts[:] = [attempt for attempt in attempts if not attempt.acknowledged]
            if not attempts:
                del self.attempts[name]

    def forget(self, name: bytes, attempt: Attempt) -> None:
        """A call failed: the same request is a new call."""
        attempts = self.attempts.get(name, [])
        if attempt in attempts:
            attempts.remove(attempt)


class Episodes:
    def __init__(self, recorder: Recorder, new_ledger: Callable[[], Ledger], *, idle_s: float) -> None:
        self._recorder, self._new_ledger, self._idle_s = recorder, new_ledger, idle_s
        self._known: dict[str, Episode] = {}

    async def get(self, name: str, calls: int) -> Episode:
        """The episode, with at least its first ``calls`` records. Raises RecordsLost, RecordError."""
        episode = self._known.get(name)
        if episode is None:
            self._forget_idle()
            episode = self._known[name] = Episode(name, self._new_ledger())
        episode.used_at = time.monotonic()
        if calls != len(episode.ledger.turns):
            await self.refresh(episode)
        return episode

    async def refresh(self, episode: Episode) -> None:
        """Read what other proxies have appended. Raises RecordsLost, RecordError."""
        async with episode.lock:  # appends of this process are in it: a number read before may be outdated by now
            left = await self._recorder.count(episode.name)
            if left < len(episode.ledger.turns):
                raise RecordsLost(f"{left} records of {episode.name} are left of {len(episode.ledger.turns)}")
            if left > len(episode.ledger.turns):
                await self.catch_up(episode)

    async def catch_up(self, episode: Episode) -> list[Attempt]:
        """Read what has been appended since; the caller holds the lock. Returns the calls read, each kept for a
        request that is sent again: nobody here has delivered its turn."""
        start, read = len(episode.ledger.turns), []
        for position, (data, stored_data) in enumerate(await self._recorder.read(episode.name, start)):
            record = records.decode(data)
            if record.seq != start + position or record.prev != episode.tail or stored_data is None:
                raise RecordsLost(f"record {start + position} of {episode.name} is missing or out of order")
            stored = decode(stored_data)
            node = episode.ledger.restore(record, stored)
            episode.tail = records.record_hash(data)
            episode.cells.append(record.cells[-1])
            output, message = len(record.output_ids), message_of(stored.message)
            created, prompt = int(record.started_at), node.end - output
            turn = Turn(stored.turn_id, created, prompt, message, record.finish_reason, output, stored.cached_tokens)
            done: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
            done.set_result(turn)
            read.append(Attempt(stored.rid, -1, turn, done, node=node))
            episode.remember(stored.name, read[-1])
        episode.forget_acknowledged()
        return read

    async def recorded_elsewhere(self, episode: Episode, name: bytes, proxy: str, patience_s: float) -> Attempt | None:
        """Wait for the turn of a call that runs in another proxy process. None when that one has given the call up, or
        is dead.

        A request whose connection to another proxy has closed is answered with that proxy's turn while that proxy
        lives, so that a harness which asks again never gets a second sample, whichever process it reaches.
        """
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            unfinished = await self._recorder.want(episode.name, name)
            await self.refresh(episode)
            if (attempt := episode.offered(name)) is not None:
                return attempt
            if not unfinished:
                return None
            if not await self._recorder.alive(proxy):
                await self._recorder.forget_left(episode.name, name)
                return None
            await asyncio.sleep(POLL_S)  # what is waited for is a field in Redis, which cannot be awaited
        return None

    def _forget_idle(self) -> None:
        oldest = time.monotonic() - self._idle_s
        for name, episode in list(self._known.items()):
            if episode.used_at < oldest and not episode.running and not episode.lock.locked():
                del self._known[name]
