"""Every deadline and bound of the gateway in one frozen model. All times in seconds."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    answer_s: float = 540.0
    """A request without streaming is answered within this time, and within nine tenths of its harness's patience if
    that is less: a 503 asks the harness to come back, and the call goes on meanwhile."""

    hold_s: float = 6 * 3600.0
    """A call waits for a cell at most this long in all."""

    generate_s: float = 3600.0
    """One engine request takes at most this long."""

    ping_s: float = 10.0
    """A stream that waits is pinged this often."""

    abandon_s: float = 120.0
    """A call whose harness has gone is aborted when nobody has come back for it in this time."""

    revoke_s: float = 15.0
    """After a route has closed, a request that the engine doesn't end within this time is cancelled."""

    suspect_s: float = 2.0
    """A cell whose engine was lost gets no new call for this long, unless its route changes."""

    redis_s: float = 60.0
    """Appending a finished call is retried this long when Redis is away."""

    refresh_s: float = 0.5
    """The route table is read again this often, besides on every notice of a change."""

    lease_s: float = 5.0
    """Life of the proxy's lease. A proxy that has not read the routes for this long sends nothing to any cell."""

    load_s: float = 1.0
    """An engine is asked for its load this often at most, and only while calls run or wait."""

    load_answer_s: float = 5.0
    """A load that isn't told within this time is not known."""

    kv_low: float = Field(default=0.85, gt=0, le=1)
    """Share of an engine's KV pool in use below which more calls may go to it than before."""

    kv_high: float = Field(default=0.95, gt=0, le=1)
    """Share of an engine's KV pool in use above which half as much may go to it."""

    queue_s: float = 10.0
    """An engine whose own queue lasts longer than this is overloaded: half as much may go to it."""

    senior_s: float = 2.0
    """When calls wait for room, each call that an episode has made counts like this much waiting."""

    near_s: float = 5.0
    """A call waits this long for room on the cell that has its prefix before it goes where there is room."""

    idle_s: float = 900.0
    """An episode without a call for this long is dropped from memory; its next call loads it from Redis."""

    body_bytes: int = 64 * 1024 * 1024
    """Largest request body."""
