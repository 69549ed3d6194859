"""A call while it runs: what was asked, and what has been sampled of it so far."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from infra.state.keys import EpisodeKey
from proxy.calls.episodes import Attempt, Episode
from proxy.calls.moved_prefixes import MovedPrefixes
from proxy.conversation.ledger import PlannedCall
from proxy.conversation.requests import ModelRequest


@dataclass(eq=False, kw_only=True)
class RunningCall:
    """From its plan to its record. What was sampled is in columns of equal length."""

    episode: Episode
    attempt: Attempt
    key: EpisodeKey
    request: ModelRequest
    planned: PlannedCall
    near: str
    """The cell that served the parent call, "" for none."""
    seniority: int
    """Calls that the episode had made."""
    elsewhere: str
    """The proxy in which the same call runs, since its connection has closed; "" for none."""
    started_at: float
    """Unix time in seconds."""

    output_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    """``stop`` or ``length``."""
    cells: list[str] = field(default_factory=list)
    active_s: float = 0.0
    held_s: float = 0.0
    """All seconds held."""
    uncredited_s: float = 0.0
    """Seconds of ``held_s`` that are not in Redis yet."""
    resampled: int = 0
    cached_tokens: int = 0
    moved: MovedPrefixes = field(default_factory=MovedPrefixes)

    @property
    def max_new_tokens(self) -> int:
        room = self.key.context_limit - len(self.planned.prompt)
        return min(self.key.max_new_tokens, room, self.request.max_tokens or room)

    def add(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Tokens that an engine has reported."""
        self.output_ids.extend(ids)
        self.logprobs += logprobs
        self.versions += versions

    def hold(self, seconds: float) -> None:
        self.held_s += seconds
        self.uncredited_s += seconds
