"""What an unfinished episode waits for now. Pure: from its pending activity and from what Redis holds of its calls.

Invariant: one episode, one wait. A call that is held comes before one that runs, and that before the harness's tools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial

from infra.state import keys
from workers.why.activity_waits import Queues, activity_wait, owner_of
from workers.why.episode_state import EpisodeState, SharedState
from workers.why.temporal import Pending
from workers.why.wait import Wait

ASKS_AGAIN = "its peers end the call, and the harness asks again"


@dataclass(frozen=True)
class Surroundings:
    """What episodes of a pool share."""

    now: datetime
    shared: SharedState
    queues: Queues = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    """Cell -> what it is told to be, in words."""
    hold_s: float | None = None
    """Seconds for which a proxy holds a call; None: the proxy hasn't said."""
    budget_s: float | None = None
    """Active seconds of an episode; None: the run's configuration isn't there."""
    wall_s: float | None = None

    def lives(self, proxy: str) -> bool:
        """Also when it isn't known of any."""
        return not self.shared.proxies or proxy in self.shared.proxies


def episode_wait(episode: str, pending: Pending, state: EpisodeState | None, around: Surroundings) -> Wait:
    """``pending``: its `run_episode` or `grade_episode`. ``state``: None when Redis can't be read."""
    what = f"episode {episode}"
    plain = activity_wait(what, pending, around.queues, around.now, kind="episode")
    if pending.activity != "run_episode":
        return plain
    if pending.state == "scheduled" and plain.reason.startswith("all workers"):
        reason = "queued: every slot of the harness workers is taken"
        return replace(plain, reason=reason, ends="a running episode ends; each has its wall limit")
    if pending.state != "started" or state is None or "no sign of life" in plain.reason:
        return plain
    later = f", generation {state.generation}" if state.generation > 1 else ""
    wait = partial(Wait, what, kind="episode", detail=f"{state.calls} calls so far{later}")
    if state.holding:
        return _held(wait, pending, state, around)
    deadline, ends = _budget_end(pending, state, around)
    if state.opened:
        call = min(state.opened.values(), key=lambda call: call.since)
        reason = f"in a call that {call.cell} samples"
        if not around.lives(call.proxy):
            reason, ends = "in a call of a proxy that is gone", ASKS_AGAIN
        return wait(f"proxy {call.proxy}, {call.cell}", reason, since=_time(call.since), deadline=deadline, ends=ends)
    if not state.lease and not state.calls:
        return wait(owner_of(pending), "its harness is being started", since=pending.started, ends=ends)
    owner = f"supervisor {state.lease}" if state.lease else owner_of(pending)
    since = _time(state.last_end) if state.last_end is not None else pending.started
    return wait(owner, "in the harness or its tools", since=since, deadline=deadline, ends=ends)


def _held(wait: Callable[..., Wait], pending: Pending, state: EpisodeState, around: Surroundings) -> Wait:
    call, held_since = min(state.holding.items(), key=lambda held: held[1])
    since, proxy = _time(held_since), call.rpartition(".")[0]
    if not around.lives(proxy):
        return wait(f"proxy {proxy}", "in a call held by a proxy that is gone", since=since, ends=ASKS_AGAIN)
    reason = f"in a call that is held: {why_held(state.versions, around.shared.routes, around.roles)}"
    limits = []
    if around.hold_s is not None:
        limits.append((since + timedelta(seconds=around.hold_s), "the proxy gives the call up"))
    if around.wall_s is not None and pending.started is not None:
        limits.append((pending.started + timedelta(seconds=around.wall_s), "its wall limit ends it"))
    deadline, ends = min(limits, default=(None, "a cell serves it"), key=lambda limit: limit[0])
    return wait(f"proxy {proxy}", reason, since=since, deadline=deadline, ends=ends)


def why_held(versions: tuple[int, int] | None, routes: Mapping[str, keys.Route], roles: Mapping[str, str]) -> str:
    """Why no cell takes a call that may be served by ``versions`` (both included)."""
    if not routes:
        return "no cell has ever served"
    serving = {cell: route for cell, route in routes.items() if route.open}
    if not serving:
        instead = ", ".join(f"{cell} {roles[cell]}" for cell in routes if roles.get(cell))
        return "every route is closed" + (f": {instead}" if instead else "")
    if versions is None:
        return "its key is gone"
    oldest, newest = versions
    fitting = [cell for cell, route in serving.items() if oldest <= route.version <= newest]
    if not fitting:
        served = ", ".join(f"{cell} serves {route.version}" for cell, route in serving.items())
        return f"no cell serves a version in [{oldest}, {newest}]: {served}"
    return f"no room on {', '.join(fitting)}"


def _budget_end(pending: Pending, state: EpisodeState, around: Surroundings) -> tuple[datetime | None, str]:
    """When the supervisor ends the episode, if nothing is held from now on."""
    if pending.started is None or around.budget_s is None or around.wall_s is None:
        return None, "its supervisor ends it with its budget"
    active = pending.started + timedelta(seconds=around.budget_s + state.held_s)
    wall = pending.started + timedelta(seconds=around.wall_s)
    return (active, "its active budget is spent") if active < wall else (wall, "its wall limit ends it")


def _time(unix_s: float) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC)
