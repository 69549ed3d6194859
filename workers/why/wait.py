"""A wait, told: what waits, who owns the wait, why, since when, and what ends it at the latest.

Pure data and its words. Invariant: a wait without a deadline still says who or what ends it. It knows nothing of where
the facts come from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class Wait:
    what: str
    """Who waits: `episode r1/000000/000/00`, `step r1/3`, `cell cell-0`."""
    owner: str
    """Who holds the wait and would act on it: a workflow's id with its activity, or a process."""
    reason: str
    """The same words for all that wait for the same thing."""
    _: KW_ONLY
    detail: str = ""
    """What is true of this one alone."""
    since: datetime | None = None
    """None: not known."""
    deadline: datetime | None = None
    ends: str
    """What happens at the deadline; without one, who or what ends the wait."""
    kind: str = ""
    """Waits of one kind (`episode`) are told together where there are many; empty for those that stand alone."""


@dataclass(frozen=True)
class Moment:
    at: datetime
    text: str


class Answer(BaseModel):
    """What `gyre why` found out about one thing, and about its parts."""

    model_config = ConfigDict(extra="forbid")

    about: str
    facts: list[str] = []
    waits: list[Wait] = []
    timeline: list[Moment] = []
    data: dict[str, Any] = {}
    """The facts for programs."""
    parts: list[Answer] = []


def merged(waits: Iterable[Wait]) -> list[Wait]:
    """Waits of one kind that wait for the same thing as one, in the order in which they first come.

    The earliest beginning and the earliest deadline stand for all.
    """
    alike: dict[tuple[str, ...], list[Wait]] = {}
    for number, wait in enumerate(waits):
        name = (wait.kind, wait.reason, wait.ends) if wait.kind else (str(number),)
        alike.setdefault(name, []).append(wait)
    return [_as_one(same) for same in alike.values()]


def _as_one(same: list[Wait]) -> Wait:
    first, count = same[0], len(same)
    if count == 1:
        return first
    owners = sorted({wait.owner for wait in same})
    return replace(
        first,
        what=f"{count} {first.kind}s",
        owner=owners[0] + (f" and {len(owners) - 1} more" if len(owners) > 1 else ""),
        detail="",
        since=min((wait.since for wait in same if wait.since is not None), default=None),
        deadline=min((wait.deadline for wait in same if wait.deadline is not None), default=None),
    )


def line(wait: Wait, now: datetime) -> str:
    """what | owner | reason | deadline"""
    reason = wait.reason + (f" ({wait.detail})" if wait.detail else "")
    if wait.since is not None:
        reason += f", since {clock(wait.since, now)} ({length((now - wait.since).total_seconds())})"
    return " | ".join((wait.what, wait.owner, reason, deadline(wait, now)))


def deadline(wait: Wait, now: datetime) -> str:
    if wait.deadline is None:
        return f"no deadline: {wait.ends}"
    left = (wait.deadline - now).total_seconds()
    when = f"in {length(left)}" if left >= 0 else f"{length(-left)} ago"
    return f"{'by' if left >= 0 else 'was due'} {clock(wait.deadline, now)} ({when}): {wait.ends}"


def clock(at: datetime, now: datetime) -> str:
    """Time of day, with the date when it isn't today's; UTC."""
    return f"{at:%H:%M:%S}" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S}"


def length(seconds: float) -> str:
    """A duration for people: 0.4 s, 12 s, 5 min, 2.5 h, 3 days."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"
