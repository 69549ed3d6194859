"""What can go wrong between gyre and an engine. One hierarchy, so that callers catch ``EngineError`` and no more."""

from __future__ import annotations

from collections.abc import Sequence


class EngineError(Exception):
    """The engine did not do what was asked."""


class EngineRefused(EngineError):
    """The engine answered with an error status: the request itself is at fault, or the engine's state is."""

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"{path}: HTTP {status}: {message}")
        self.status = status
        self.message = message


class EngineLost(EngineError):
    """The engine died, hung or cut the connection in the middle of a call.

    Carries what had arrived: ``output_ids``, their ``logprobs`` and their ``versions``, all of one length. The
    engine may have sampled more.
    """

    def __init__(
        self,
        message: str,
        output_ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        versions: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.output_ids = list(output_ids)
        self.logprobs = list(logprobs)
        self.versions = list(versions)


class EngineVersionMismatch(EngineError):
    """The engine sampled with another weight version than the one that was asked for. Its tokens are not used."""
