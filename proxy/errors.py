"""What the gateway refuses, and why. Dialects put these into their provider's words and status codes.

Client errors are 400 on purpose: harnesses give up on a 400 at once, but retry a 401 or 429 for minutes.
"""

from __future__ import annotations


class GatewayError(Exception):
    """A request that gets no turn. ``status`` is the HTTP status, ``code`` a stable name for programs."""

    status = 400
    code = "invalid_request"


class BadRequest(GatewayError):
    """The body is not a request of this dialect, or asks for what the gateway refuses. ``param`` names the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BodyTooLarge(GatewayError):
    status = 413
    code = "body_too_large"


class UnknownPath(GatewayError):
    status = 404
    code = "unknown_url"


class KeyRefused(GatewayError):
    """No such key, or one of an older generation of its episode."""

    code = "invalid_api_key"


class CallsExceeded(GatewayError):
    """The episode has used all its calls."""

    code = "call_limit_exceeded"


class ContextExceeded(GatewayError):
    """The prompt leaves no room for a single sampled token. ``limit`` and ``prompt`` in tokens."""

    code = "context_length_exceeded"

    def __init__(self, limit: int, prompt: int) -> None:
        super().__init__(f"prompt of {prompt} tokens, context limit of {limit}")
        self.limit, self.prompt = limit, prompt


class RecordsLost(GatewayError):
    """Redis holds fewer records of the episode than were made durable: the episode cannot go on."""

    code = "records_lost"


class Unavailable(GatewayError):
    """Nothing is wrong with the request: it may be sent again after ``retry_after`` seconds."""

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoCell(Unavailable):
    """No cell could serve the call before its deadline."""

    code = "no_cell"


class Abandoned(Unavailable):
    """The harness went away and did not come back for the turn."""

    code = "abandoned"
