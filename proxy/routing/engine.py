"""What the gateway needs of an inference engine; ``infra.sglang.client.EngineClient`` provides it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from infra.sglang.client import Loads
from infra.sglang.generation import GenerateRequest, Generation


class Engine(Protocol):
    """One engine process. Errors are those of ``infra.sglang.errors``."""

    async def generate(self, request: GenerateRequest, /) -> Generation:
        """Sample until a stop token, ``max_new_tokens`` or an abort."""
        ...

    async def abort(self, rid: str, deadline_s: float = ...) -> None:
        """End a request: its ``generate`` returns what was sampled. Raises EngineError when it doesn't in time."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Reporting(Protocol):
    """An engine that tells how loaded it is; one that doesn't is never held back for its load."""

    async def loads(self) -> Loads:
        """Raises EngineError; EngineRefused with status 404 when this engine doesn't report."""
        ...
