"""What a training replica's process is asked and answers, and the client that asks it.

One JSON body per endpoint over the cell's unix socket. Imports neither torch nor Megatron, since workers use it. Every
call has a deadline; a replica that does not answer (``ReplicaUnavailable``) is told apart from one that says no
(``ReplicaError``, with what is missing, doubled or lost). What the calls do is in ``infra.megatron.service``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict, ValidationError

from infra.transfer.manifest import TransferManifest
from trajectory.config import LossConfig, OptimizerConfig

CameBy = Literal["resident", "transfer", "blob"]
"""How weights came into a replica."""


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Status(Body):
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


class PrepareRequest(Body):
    run: str
    version: int
    as_core: bool
    """Also hold the optimizer state of that version."""
    optimizer: OptimizerConfig
    loss: LossConfig
    candidate_ref: str
    """The candidate that is this version; whatever the weights come from, they must have its checksum."""
    fence: str = ""
    """An incarnation that was declared lost. If it is this one it forgets its gradient sum and updates, and goes on as
    another incarnation."""


class PrepareResponse(Body):
    came_by: CameBy
    seconds: float
    bytes: int
    """Moved into this process, optimizer state included."""


class TrainRequest(Body):
    run: str
    step: int
    version: int
    micro_steps: tuple[str, ...]


class TrainResponse(Body):
    incarnation: str
    stats: dict[str, dict[str, Any]]
    """Micro-step -> its loss statistics."""
    seconds: float


class GradientsRequest(Body):
    run: str
    step: int


class PublishedSum(Body):
    """A replica's gradient sum: what it covers and where to read it."""

    incarnation: str
    ids: tuple[str, ...]
    manifest: TransferManifest


class FinishRequest(Body):
    run: str
    step: int
    version: int
    normaliser: float
    micro_steps: tuple[str, ...]
    """All micro-steps of the step."""
    satellites: tuple[PublishedSum, ...] = ()
    record_gradient: bool = False


class FinishResponse(Body):
    candidate_ref: str
    version: int
    grad_norm: float
    checksum: str
    seconds: float


class PublishRequest(Body):
    run: str
    version: int


class PublishResponse(Body):
    incarnation: str
    checksum: str
    seconds: float


class ServeRequest(Body):
    run: str
    version: int
    candidate_ref: str
    engine_url: str


class ServeResponse(Body):
    came_by: CameBy
    checksum: str
    """Of the weights as the engine holds them."""
    seconds: float


class Problem(Body):
    """Why a replica says no."""

    detail: str
    missing: tuple[str, ...] = ()
    """Micro-steps that no accepted sum covers."""
    doubled: tuple[str, ...] = ()
    """Micro-steps that more than one sum covers."""
    lost: tuple[str, ...] = ()
    """Incarnations whose sums could not be read."""


class ReplicaUnavailable(RuntimeError):
    """The replica's process did not answer: not started, dead, or past the deadline. The call may have been done."""


class ReplicaError(RuntimeError):
    """The replica answered and said no. ``status`` 409: the request does not fit what it holds; 424: a sum is lost;
    422: the request is malformed; 500: a fault, described in ``problem.detail``."""

    def __init__(self, what: str, status: int, problem: Problem) -> None:
        super().__init__(f"{what}: {problem.detail}")
        self.status = status
        self.problem = problem


Answer = TypeVar("Answer", bound=Body)


class ReplicaClient:
    """Asks one replica. An async context manager; use from one event loop. Deadlines are in seconds per call."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ReplicaClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def status(self, *, deadline: float = 5.0) -> Status:
        return await self._call("GET", "status", None, Status, deadline)

    async def prepare(self, request: PrepareRequest, *, deadline: float = 300.0) -> PrepareResponse:
        return await self._call("POST", "prepare", request, PrepareResponse, deadline)

    async def train(self, request: TrainRequest, *, deadline: float = 600.0) -> TrainResponse:
        return await self._call("POST", "train", request, TrainResponse, deadline)

    async def gradients(self, request: GradientsRequest, *, deadline: float = 120.0) -> PublishedSum:
        return await self._call("POST", "gradients", request, PublishedSum, deadline)

    async def finish(self, request: FinishRequest, *, deadline: float = 600.0) -> FinishResponse:
        return await self._call("POST", "finish", request, FinishResponse, deadline)

    async def publish(self, request: PublishRequest, *, deadline: float = 120.0) -> PublishResponse:
        return await self._call("POST", "publish", request, PublishResponse, deadline)

    async def serve(self, request: ServeRequest, *, deadline: float = 300.0) -> ServeResponse:
        return await self._call("POST", "serve", request, ServeResponse, deadline)

    async def _call(self, method: str, path: str, body: Body | None, answer: type[Answer], deadline: float) -> Answer:
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
        raise ReplicaError(what, status, problem)
