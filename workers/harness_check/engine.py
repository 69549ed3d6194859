"""A scripted engine: what a gateway needs of an engine, without a model. Checks, benches and tests have this one.

It sees what an engine sees, token ids, and asks a script for the whole turn. A call that was cut off (by an abort, a
death, a drain) goes on where it was, on whichever engine of the script: its next request has the sampled tokens at the
end of its prompt, and gets the rest of the turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from infra.sglang.errors import EngineError, EngineLost
from infra.sglang.generation import Finish, GenerateRequest, Generation

LOGPROB = -0.5
"""Of every token."""
CACHED_TOKENS = 7


@dataclass(frozen=True)
class ScriptedTurn:
    """What a script says to a prompt."""

    output_ids: list[int]
    held: bool = False
    """The engine holds back this turn, and what it is asked from then on, until its gate is opened."""
    dies: bool = False
    """The engine is lost in the middle of it."""


class Script:
    """What a policy says: ``say`` gets the prompt of a call and returns its whole turn, once for each call."""

    def __init__(self, say: Callable[[list[int]], ScriptedTurn]) -> None:
        self._say = say
        self._begun: dict[str, tuple[int, ScriptedTurn]] = {}
        """Call -> tokens of its first prompt, and its turn."""

    def turn(self, call: str, prompt: list[int]) -> tuple[ScriptedTurn, int]:
        """The turn of a call, and how many of its tokens the prompt ends in."""
        if call not in self._begun:
            self._begun[call] = len(prompt), self._say(prompt)
        first, turn = self._begun[call]
        return turn, len(prompt) - first


@dataclass
class SeenRequest:
    """What an engine was asked, and what it gave: nothing while it holds back, and when it was aborted before."""

    input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    version: int = 0
    max_new_tokens: int = 0
    held: bool = False
    """The script held it back: its harness may have been killed meanwhile, and then nobody got the answer."""
    lost: bool = False
    """The engine died in the middle of it: the next request has its tokens in its prompt."""

    @property
    def sequence(self) -> list[int]:
        return self.input_ids + self.output_ids


class ScriptedEngine:
    """An ``proxy.routing.engine.Engine``."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[SeenRequest] = []
        self.gate = asyncio.Event()
        """While it is closed nothing is answered."""
        self.gate.set()
        self.holding = asyncio.Event()
        """The script has held back a turn; it does so once."""
        self.stop_after: int | None = None
        """Deliver so many tokens before the gate is waited for."""
        self.deaf = False
        """Ignores aborts."""
        self.dead = False
        self._aborted: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        prompt, most = [int(token) for token in request.input_ids], request.max_new_tokens
        turn, done = self.script.turn(request.rid.rpartition(".")[0], prompt)
        rest = turn.output_ids[done : done + most]
        seen = SeenRequest(prompt, version=request.version, max_new_tokens=most)
        self.seen.append(seen)
        if turn.dies and not done:
            seen.lost, seen.output_ids = True, rest[: len(rest) // 2]
            raise self._lost(seen)
        if self.stop_after is not None:
            seen.output_ids = rest[: self.stop_after]
            if request.on_tokens is not None:
                request.on_tokens(seen.output_ids, _logprobs(seen))
        if turn.held and not self.holding.is_set():
            seen.held = True
            self.gate.clear()
            self.holding.set()
        aborted = await self._pass_gate(request.rid)
        if self.dead:
            raise self._lost(seen)
        if aborted:
            return _generation(seen, "abort")
        seen.output_ids = rest
        return _generation(seen, "stop" if rest and rest[-1] in request.stop_token_ids else "length")

    async def abort(self, rid: str, deadline_s: float = 1.0) -> None:
        if self.deaf:
            await asyncio.sleep(deadline_s)
            raise EngineError("deaf")
        self._aborted.setdefault(rid, asyncio.Event()).set()

    async def close(self) -> None:
        return

    def die(self) -> None:
        """Lose what is being sampled, and whatever is asked from now on."""
        self.dead = True
        self.gate.set()

    async def _pass_gate(self, rid: str) -> bool:
        """Return when the gate is open or the request is aborted; whether it was aborted."""
        aborted = self._aborted.setdefault(rid, asyncio.Event())
        if not self.gate.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self.gate, aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return aborted.is_set()

    def _lost(self, seen: SeenRequest) -> EngineLost:
        return EngineLost("scripted death", seen.output_ids, _logprobs(seen), _versions(seen))


def _generation(seen: SeenRequest, finish: Finish) -> Generation:
    return Generation(list(seen.output_ids), _logprobs(seen), _versions(seen), finish, CACHED_TOKENS)


def _logprobs(seen: SeenRequest) -> list[float]:
    return [LOGPROB] * len(seen.output_ids)


def _versions(seen: SeenRequest) -> list[int]:
    return [seen.version] * len(seen.output_ids)
