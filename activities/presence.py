"""Whether the processes of a cell answer, and long calls of them that end when they don't.

Invariant: no activity waits for an engine or a replica that answers nothing else either, however long its own call may
take. A process that is merely busy answers. Knows nothing of roles, epochs or steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, Protocol, TypeVar

from infra.megatron.protocol import ReplicaClient, ReplicaUnavailable
from infra.sglang.errors import EngineError
from workflows.contracts.orders import CellReport

LOOK_S: Final = 4.0
"""Seconds in which a process has to answer a look."""
EVERY_S: Final = 2.0
"""Seconds between looks while a long call is awaited."""
MISSED: Final = 6
"""Silent looks in a row after which a process counts as gone."""

Answer = TypeVar("Answer")


class Silent(ReplicaUnavailable):
    """A process of the cell answers nothing."""


class Named(Protocol):
    async def incarnation(self) -> str: ...


class Presence:
    """Looks at a cell's engine and replica. ``engine`` None: only the replica matters."""

    def __init__(self, replica: ReplicaClient, engine: Named | None = None) -> None:
        self._replica, self._engine = replica, engine

    async def look(self, *, needs_engine: bool = True) -> CellReport:
        """The incarnations of what answers within `LOOK_S`; ``missing`` names what should and doesn't."""
        engine, replica = await asyncio.gather(self._engine_name(), self._replica_name())
        silent = ["engine"] if needs_engine and self._engine is not None and not engine else []
        silent += [] if replica else ["replica"]
        return CellReport(engine=engine, replica=replica, missing=" and ".join(silent))

    async def while_answering(self, call: Coroutine[Any, Any, Answer], *, needs_engine: bool = True) -> Answer:
        """The answer of a long call. Raises Silent when the cell falls silent before there is one."""
        answer = asyncio.ensure_future(call)
        silent = 0
        try:
            while True:
                done, _ = await asyncio.wait({answer}, timeout=EVERY_S)
                if done:
                    return answer.result()
                seen = await self.look(needs_engine=needs_engine)
                silent = silent + 1 if seen.missing else 0
                if silent >= MISSED:
                    raise Silent(f"{seen.missing}: no answer to {MISSED} looks, nor to the call")
        finally:
            answer.cancel()

    async def _engine_name(self) -> str:
        if self._engine is None:
            return ""
        try:
            async with asyncio.timeout(LOOK_S):
                return await self._engine.incarnation()
        except (EngineError, TimeoutError):
            return ""

    async def _replica_name(self) -> str:
        try:
            return (await self._replica.status(deadline=LOOK_S)).incarnation
        except ReplicaUnavailable:
            return ""
