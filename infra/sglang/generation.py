"""One generation: the body that asks for it, and the assembly of what the engine answers. Pure.

The invariant: ids, log-probs and versions have one length, and every token was sampled by the version that was
asked for. It knows SGLang's ``/generate`` messages, whole or streamed; it knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

from infra.kv_store.pages import cache_salt
from infra.sglang.errors import EngineError, EngineRefused, EngineVersionMismatch

Finish = Literal["stop", "length", "abort"]
TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Token ids. An ``array("i")`` or a numpy array is sent as it is: a million ids never become Python objects."""

OnTokens = Callable[[list[int], list[float]], None]

RID_END = "$"
"""Ends every request id on the wire: SGLang aborts all requests whose id *starts with* the given one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What one engine request samples: plain sampling from a prompt, under one weight version."""

    input_ids: TokenIds
    """int[p]: the prompt."""
    rid: str
    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    stop_token_ids: Sequence[int] = ()
    version: int
    weights: str = ""
    """Checksum of the version's weights where it is known: KV is separated by it."""
    on_tokens: OnTokens | None = None
    """Gets each batch of (ids, log-probs). With it the answer is streamed, and an engine that dies leaves what had
    arrived in EngineLost. Without it the answer is one message: cheaper, but a dead engine leaves nothing."""
    deadline_s: float
    """After so many seconds the request is aborted, and returned as such."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one engine request sampled."""

    output_ids: list[int]
    """The token that stopped it included."""
    logprobs: list[float]
    """Log-probability of each sampled token at the request's temperature (at 1 when sampled greedily)."""
    versions: list[int]
    """Weight version that sampled each token."""
    finish: Finish
    cached_tokens: int
    """Prompt tokens whose KV wasn't computed: the engine had it, or the KV store."""
    cached_host: int = 0
    """Of these, those that lay in the tier between the engine's own pool and the store."""
    cached_storage: int = 0
    """Of these, those that came from the store."""


def wire_id(rid: str) -> str:
    """The request id as the engine sees it. Raises ValueError for an id that the engine could confuse."""
    if not rid or RID_END in rid:
        raise ValueError(f"a request id is not empty and has no {RID_END!r}: {rid!r}")
    return rid + RID_END


def generate_body(request: GenerateRequest, vocab_size: int) -> dict[str, Any]:
    """Body of ``/generate``: plain sampling, log-probs of the output, KV separated by weights (``cache_salt``).

    It holds the prompt as a numpy array, which ``encode_body`` writes.

    Raises ValueError for an empty prompt, an id outside [0, vocab_size) (it would kill the engine), no tokens to
    sample, or a negative temperature.
    """
    ids = np.ascontiguousarray(request.input_ids)
    if not ids.size:
        raise ValueError("the prompt is empty")
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != 1:
        raise ValueError(f"token ids are a row of integers, not {ids.ndim} dimensions of {ids.dtype}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"token ids [{ids.min()}, {ids.max()}] are not inside the vocabulary of {vocab_size}")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {request.max_new_tokens}; at least 1 is needed")
    if not request.temperature >= 0:
        raise ValueError(f"temperature is {request.temperature}")
    return {
        "rid": wire_id(request.rid),
        "input_ids": ids,
        "return_logprob": True,
        "stream": request.on_tokens is not None,
        "cache_salt": cache_salt(request.version, request.weights),
        "sampling_params": {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "stop_token_ids": list(request.stop_token_ids),
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
        },
    }


def encode_body(body: dict[str, Any]) -> bytes:
    """JSON of a body."""
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


class Assembly:
    """Tokens of one request as its messages arrive."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self._last: dict[str, Any] = {}

    @property
    def versions(self) -> list[int]:
        return [self.version] * len(self.output_ids)

    @property
    def finished(self) -> bool:
        return self._last.get("finish_reason") is not None

    def add(self, message: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Take one message; returns its new tokens and their log-probs.

        Raises EngineRefused for an error message and EngineError for one whose columns don't agree.
        """
        if "error" in message:
            error = message["error"]
            raise EngineRefused("/generate", int(error.get("code") or 400), str(error.get("message", error)))
        meta = message["meta_info"]
        # ``completion_tokens`` is the total so far. The message about a request that was aborted in the queue
        # repeats tokens that an earlier message carried, so only what exceeds our count is new.
        count = int(meta["completion_tokens"]) - len(self.output_ids)
        ids: list[int] = message["output_ids"][-count:] if count > 0 else []
        entries = meta.get("output_token_logprobs", ())[-count:] if count > 0 else ()
        logprobs: list[float] = [entry[0] for entry in entries]
        if len(ids) != max(count, 0) or [entry[1] for entry in entries] != ids:
            raise EngineError(f"{count} new tokens announced, {len(ids)} ids and {len(entries)} log-probs sent")
        if None in logprobs:
            raise EngineError("the engine reports a log-probability that is not a number")
        self.output_ids += ids
        self.logprobs += logprobs
        self._last = meta
        return ids, logprobs

    def result(self) -> Generation:
        """The finished generation.

        Raises EngineRefused when the engine gave the request up for an error of its own, and
        EngineVersionMismatch when other weights than those asked for sampled any token.
        """
        reason = self._last["finish_reason"]
        finish: Finish = reason["type"]
        if finish == "abort" and reason.get("status_code") is not None:
            raise EngineRefused("/generate", int(reason["status_code"]), str(reason.get("message")))
        self._check_versions()
        cached = int(self._last.get("cached_tokens") or 0)
        details = self._last.get("cached_tokens_details") or {}
        host, storage = (int(details.get(where) or 0) for where in ("host", "storage"))
        return Generation(self.output_ids, self.logprobs, self.versions, finish, cached, host, storage)

    def _check_versions(self) -> None:
        spans = self._last.get("weight_versions") or [{"version": self._last["weight_version"]}]
        seen = {str(span["version"]) for span in spans}
        if self.output_ids and seen != {str(self.version)}:
            raise EngineVersionMismatch(f"asked for version {self.version}, sampled by {sorted(seen)}")
