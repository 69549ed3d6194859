"""What an unfinished episode waits for now. Pure: from its pending activity and from what Redis holds of its calls.

Invariant: one episode, one wait. A call that is held comes before one that runs, and that before the harness's tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from infra.state import keys
from workers.why.pending import Queues, activity_wait, owner_of
from workers.why.spoken import Shared, Spoken
from workers.why.temporal import Pending
from workers.why.wait import Wait


@dataclass(frozen=True)
class Surroundings:
    """What episodes of a pool share."""

    now: datetime
    shared: Shared
    queues: Queues = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    """Cell -> what it is told to be, in words."""
    hold_s: float | None = None
    """Seconds for which a proxy holds a call; None: the proxy hasn't said."""
    budget_s: float | None = None
    """Active seconds of an episode; None: the run's configuration isn't there."""
    wall_s: float | None = None


def episode_wait(episode: str, pending: Pending, spoken: Spoken | None, around: Surroundings) -> Wait:
    """``pending``: its `run_episode` or `grade_episode`. ``spoken``: None when Redis can't be read."""
    what = f"episode {episode}"
    if pending.activity != "run_episode" or pending.state != "started" or spoken is None:
        wait = activity_wait(what, pending, around.queues, around.now, kind="episode")
        return _queued(wait, around) if pending.activity == "run_episode" and pending.state == "scheduled" else wait
    plain = activity_wait(what, pending, around.queues, around.now, kind="episode")
    if "no sign of life" in plain.reason:
        return plain
    detail = _so_far(spoken, around.now)
    if spoken.holding:
        return _held(what, pending, spoken, around).model_copy(update={"detail": detail})
    deadline, ends = _budget_end(pending, spoken, around)
    if spoken.opened:
        opened = min(spoken.opened.values(), key=lambda call: call.since)
        owner = f"proxy {opened.proxy}, {opened.cell}"
        reason = f"in a call that {opened.cell} samples"
        if around.shared.proxies and opened.proxy not in around.shared.proxies:
            reason, ends = "in a call of a proxy that is gone", "its peers end the call, and the harness asks again"
        return _wait(what, owner, reason, detail, since=_time(opened.since), deadline=deadline, ends=ends)
    if not spoken.lease and not spoken.calls:
        return _wait(what, owner_of(pending), "its harness is being started", detail, since=pending.started, ends=ends)
    owner = f"supervisor {spoken.lease}" if spoken.lease else owner_of(pending)
    since = _time(spoken.last_end) if spoken.last_end is not None else pending.started
    reason = "in the harness or its tools"
    return _wait(what, owner, reason, detail, since=since, deadline=deadline, ends=ends)


def _queued(wait: Wait, around: Surroundings) -> Wait:
    if not wait.reason.startswith("all workers"):
        return wait
    reason = "queued: every slot of the harness workers is taken"
    return wait.model_copy(update={"reason": reason, "ends": "a running episode ends; each has its wall limit"})


def _held(what: str, pending: Pending, spoken: Spoken, around: Surroundings) -> Wait:
    call, held_since = min(spoken.holding.items(), key=lambda held: held[1])
    since, proxy = _time(held_since), spoken.proxy_of(call)
    if around.shared.proxies and proxy not in around.shared.proxies:
        ends = "its peers end the call, and the harness asks again"
        return _wait(what, f"proxy {proxy}", "in a call held by a proxy that is gone", since=since, ends=ends)
    reason = f"in a call that is held: {why_held(spoken.versions, around.shared.routes, around.roles)}"
    ends = "a cell serves it"
    limits = []
    if around.hold_s is not None:
        limits.append((since + timedelta(seconds=around.hold_s), "the proxy gives the call up"))
    if around.wall_s is not None and pending.started is not None:
        limits.append((pending.started + timedelta(seconds=around.wall_s), "its wall limit ends it"))
    deadline, ends = min(limits, default=(None, ends), key=lambda limit: limit[0])
    return _wait(what, f"proxy {proxy}", reason, since=since, deadline=deadline, ends=ends)


def why_held(versions: tuple[int, int] | None, routes: Mapping[str, keys.Route], roles: Mapping[str, str]) -> str:
    """Why no cell takes a call that may be served by ``versions`` (both included)."""
    if not routes:
        return "no cell has ever served"
    serving = {cell: route for cell, route in routes.items() if route.open}
    if not serving:
        told = [f"{cell} {roles[cell]}" for cell in routes if roles.get(cell)]
        return "every route is closed" + (f": {', '.join(told)}" if told else "")
    if versions is None:
        return "its key is gone"
    oldest, newest = versions
    fitting = [cell for cell, route in serving.items() if oldest <= route.version <= newest]
    if not fitting:
        served = ", ".join(f"{cell} serves {route.version}" for cell, route in serving.items())
        return f"no cell serves a version in [{oldest}, {newest}]: {served}"
    return f"no room on {', '.join(fitting)}"


def _budget_end(pending: Pending, spoken: Spoken, around: Surroundings) -> tuple[datetime | None, str]:
    """When the supervisor ends the episode, if nothing is held from now on."""
    if pending.started is None or around.budget_s is None or around.wall_s is None:
        return None, "its supervisor ends it with its budget"
    active = pending.started + timedelta(seconds=around.budget_s + spoken.held_s)
    wall = pending.started + timedelta(seconds=around.wall_s)
    return (active, "its active budget is spent") if active < wall else (wall, "its wall limit ends it")


def _so_far(spoken: Spoken, now: datetime) -> str:
    said = f"{spoken.calls} calls so far"
    return said + (f", generation {spoken.generation}" if spoken.generation > 1 else "")


def _time(unix_s: float) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC)


def _wait(
    what: str,
    owner: str,
    reason: str,
    detail: str = "",
    *,
    since: datetime | None,
    deadline: datetime | None = None,
    ends: str,
) -> Wait:
    return Wait(
        what=what,
        owner=owner,
        reason=reason,
        detail=detail,
        since=since,
        deadline=deadline,
        ends=ends,
        kind="episode",
    )
