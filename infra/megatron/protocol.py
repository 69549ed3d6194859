"""How a training replica's process is asked, and what it says when it refuses.

One JSON body per endpoint over the cell's unix socket: the orders and answers of ``workflows.contracts.orders``.
Imports neither torch nor Megatron, since workers use it. Every call has a deadline; a replica that does not answer
(``ReplicaUnavailable``) is told apart from one that says no (``ReplicaError``, with what is missing, doubled or lost).
What the calls do is in ``infra.megatron.service``.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

import aiohttp
from pydantic import ValidationError

from workflows.contracts.configuration import Contract
from workflows.contracts.orders import (
    Candidate,
    CellOrder,
    CellReport,
    FinishInput,
    GradientsInput,
    GradientSum,
    ServeOrder,
    TrainInput,
    TrainResult,
)


class Status(Contract):
    incarnation: str
    """Drawn anew at every start of the process, and when it is fenced."""
    run: str | None
    """Of the weights held; None before the first."""
    version: int
    """Of the weights held, -1 before the first."""
    optimizer_version: int
    """Of the optimizer state held, -1 when there is none."""
    step: int | None
    """The step whose gradient sum is held."""
    done: tuple[str, ...]
    """Micro-steps in that sum, in the order in which they were trained."""
    resident_bytes: int
    busy: str | None
    """The endpoint that is being answered."""


class PublishRequest(Contract):
    run: str
    version: int


class Problem(Contract):
    """Why a replica says no."""

    detail: str
    missing: tuple[str, ...] = ()
    """Micro-steps that no accepted sum covers."""
    doubled: tuple[str, ...] = ()
    """Micro-steps that more than one sum covers."""
    lost: tuple[str, ...] = ()
    """Incarnations whose sums could not be read."""


class ReplicaUnavailable(RuntimeError):
    """The replica's process did not answer: not started, dead, or past the deadline; or it could not store its answer.
    The call may have been done, and can be repeated."""


class ReplicaError(RuntimeError):
    """The replica says no; raised in its process and, with ``where`` it was asked, in the one that asks.

    ``status`` 409: the order does not fit what it holds; 424: a sum is lost; 422: the order is malformed; 500: a fault,
    described in ``problem.detail``; 503, for the client ``ReplicaUnavailable``: its answer could not be stored.
    """

    def __init__(self, problem: Problem, status: int = 409, where: str = "") -> None:
        super().__init__(f"{where}: {problem.detail}" if where else problem.detail)
        self.problem, self.status = problem, status


Answer = TypeVar("Answer", bound=Contract)


class ReplicaClient(AbstractAsyncContextManager["ReplicaClient"]):
    """Asks one replica. An async context manager; use from one event loop. Deadlines are in seconds per call."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def status(self, *, deadline: float = 5.0) -> Status:
        return await self._call("GET", "status", None, Status, deadline)

    async def prepare(self, order: CellOrder, *, deadline: float = 300.0) -> CellReport:
        return await self._call("POST", "prepare", order, CellReport, deadline)

    async def train(self, order: TrainInput, *, deadline: float = 600.0) -> TrainResult:
        return await self._call("POST", "train", order, TrainResult, deadline)

    async def gradients(self, order: GradientsInput, *, deadline: float = 120.0) -> GradientSum:
        return await self._call("POST", "gradients", order, GradientSum, deadline)

    async def finish(self, order: FinishInput, *, deadline: float = 600.0) -> Candidate:
        return await self._call("POST", "finish", order, Candidate, deadline)

    async def publish(self, request: PublishRequest, *, deadline: float = 120.0) -> CellReport:
        return await self._call("POST", "publish", request, CellReport, deadline)

    async def serve(self, order: ServeOrder, *, deadline: float = 300.0) -> CellReport:
        return await self._call("POST", "serve", order, CellReport, deadline)

    async def _call(
        self, method: str, path: str, body: Contract | None, answer: type[Answer], deadline: float
    ) -> Answer:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(self._socket)))
        what = f"replica {self._socket.parent.name} /{path}"
        try:
            async with self._session.request(
                method,
                f"http://replica/{path}",
                data=None if body is None else body.model_dump_json(),
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=deadline),
            ) as response:
                status, text = response.status, await response.text()
        except asyncio.TimeoutError as error:  # noqa: UP041 - aiohttp's own timeout derives from this name
            raise ReplicaUnavailable(f"{what}: no answer within {deadline:g} s") from error
        except aiohttp.ClientError as error:
            raise ReplicaUnavailable(f"{what}: {error}") from error
        if status == 200:
            return answer.model_validate_json(text)
        try:
            problem = Problem.model_validate_json(text)
        except ValidationError:  # not written by the service: a malformed request, refused by the framework
            problem = Problem(detail=f"HTTP {status}: {text[:500]}")
        if status == 503:
            raise ReplicaUnavailable(f"{what}: {problem.detail}")
        raise ReplicaError(problem, status, what)
