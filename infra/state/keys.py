"""Names of everything that gyre keeps in Redis, and the small values that are kept under them.

One place, so that a reader can see the whole of the shared state. Values are JSON of the models below, except
call records (bytes of ``trajectory.records``).
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

ROUTES = "gyre:routes"
"""Hash: cell name -> Route."""

ROUTES_CHANGED = "gyre:routes:changed"
"""Pub/sub channel: a cell name whose route changed."""


class Route(BaseModel):
    """How proxies reach a cell's engine. Replaced only by compare-and-set on (incarnation, epoch)."""

    model_config = ConfigDict(frozen=True)

    cell: str
    url: str
    incarnation: str
    """Identity of the engine process; a restarted engine is another incarnation."""
    epoch: int
    """Of the scheduler's desired state that produced this route. Never decreases within an incarnation."""
    open: bool
    """False: no new request may be sent; unfinished ones may end within ``drain_s``, else are resubmitted elsewhere."""
    version: int
    """Weight version that the engine serves."""
    weights: str = ""
    """The engine's checksum of them: equal weights have equal checksums, whichever run made them. "" for unknown."""
    drain_s: float = 0.0
    """Of a closed route: seconds for which requests that run on it may go on. Each proxy counts them by its own clock,
    from when it saw the route closed; that later epochs close it again doesn't begin the count anew."""


class Drained(BaseModel):
    """What became of the requests of one proxy that ran on a cell when its route closed."""

    model_config = ConfigDict(frozen=True)

    ended: int = 0
    """They were over before they would have been aborted."""
    moved: int = 0
    """They were aborted, and what they had sampled was taken along."""


class EpisodeKey(BaseModel):
    """What an API key stands for. The key is all that a harness knows of gyre."""

    model_config = ConfigDict(frozen=True)

    episode: str
    generation: int
    """Keys of an older generation than ``generation_of(episode)`` are refused."""
    min_version: int
    max_version: int
    """The call may be served by any weight version in [min_version, max_version]."""
    temperature: float
    max_new_tokens: int
    """Sampled tokens per turn at most."""
    context_limit: int
    """Tokens of prompt and output together at most."""
    max_calls: int
    """Calls of the episode at most; further ones are refused and the episode counts as truncated."""
    harness: str = ""
    """Name of the harness, for counts."""
    patience_s: float = 600.0
    """How long the harness waits for an answer without a stream, in seconds."""
    early_stream: bool = True
    """A stream may be opened before its turn is there."""


def key(api_key: str) -> str:
    """String: EpisodeKey. Deleted when the episode ends."""
    return f"gyre:key:{api_key}"


def _of_episode(what: str) -> Callable[[str], str]:
    return lambda episode: f"gyre:ep:{episode}:{what}"


calls = _of_episode("calls")
"""List: encoded call records, in order."""

turns = _of_episode("turns")
"""Hash: call number -> encoded messages behind that call's record, from which a proxy rebuilds its ledger.

Written in the same script as the record. Only proxies read it."""

open_calls = _of_episode("open")
"""Hash: request id -> JSON of an unfinished call, written before the engine is asked."""

left_calls = _of_episode("left")
"""Hash: name of a request (hex) -> JSON of an unfinished call whose connection has closed.

The same request, sent again to another proxy, waits for that call's turn instead of sampling one of its own."""

wanted_calls = _of_episode("wanted")
"""Hash: name of a request (hex) -> Unix time at which a proxy last waited for another proxy's call."""

counts = _of_episode("counts")
"""Hash of integers that no call record holds: ``replayed`` (turns delivered again), ``disagreements`` (of harness
hints with what the conversation shows)."""

generation_of = _of_episode("generation")
"""Integer: the generation that may speak for the episode."""

records_of = _of_episode("records")
"""String: name under which the records of the generation that may speak lie; absent before the first."""

restarts = _of_episode("restarts")
"""Hash: generation of the episode that was lost -> when, why, and what followed, in one line."""

held = _of_episode("held")
"""Float: seconds for which the proxy held the episode's finished calls; not charged to its budget."""

holding = _of_episode("holding")
"""Hash: request id -> Unix time since which an unfinished call is being held."""

lease = _of_episode("lease")
"""String with a TTL: the supervisor that may run the episode's harness (``generation:pid``)."""

truncated = _of_episode("truncated")
"""String: why the proxy refused further calls (``context``, ``calls``); absent otherwise."""

api_key_of = _of_episode("key")
"""String: the API key that the episode's harness was given, so that it can be revoked."""


def of_episode(episode: str) -> list[str]:
    """Every key of an episode; none is needed once its records are sealed."""
    spoken = (calls, turns, open_calls, left_calls, wanted_calls, counts)
    run = (generation_of, restarts, held, holding, lease, truncated, api_key_of)
    return [name(episode) for name in spoken + run]


PROXIES = "gyre:proxies"
"""Set: ids of proxies that have ever registered; one whose lease has run out is dead."""


def proxy_lease(proxy_id: str) -> str:
    """String with a TTL: a live proxy process."""
    return f"gyre:proxy:{proxy_id}"


def proxy_calls(proxy_id: str) -> str:
    """Hash: request id -> episode of each unfinished call of a proxy, so that its peers can end them when it dies."""
    return f"gyre:proxy:{proxy_id}:calls"


def route_acks(cell: str) -> str:
    """Hash: proxy id -> ``incarnation:epoch`` of the closed route on which it has no request left."""
    return f"gyre:route:{cell}:acks"


def route_drains(cell: str) -> str:
    """Hash: proxy id -> Drained, written together with the acknowledgement."""
    return f"gyre:route:{cell}:drains"


def engine_memory(cell: str) -> str:
    """String: ``releasing`` or ``released`` and the incarnation of the engine that is without its serving memory."""
    return f"gyre:cell:{cell}:memory"


def weights(run: str, version: int) -> str:
    """Hash: source id -> transfer manifest (JSON) of a process that can be read for this version."""
    return f"gyre:weights:{run}:{version}"


def open_steps(run: str) -> str:
    """Set: numbers of the run's open steps."""
    return f"gyre:run:{run}:steps"


def _of_step(what: str) -> Callable[[str, int], str]:
    return lambda run, step: f"gyre:step:{run}:{step}:{what}"


step_demand = _of_step("demand")
"""Hash: ``total`` of a step's episodes; ``plan``: its tasks, group size and budget (JSON)."""

step_running = _of_step("running")
"""Set: episodes of the step that are running."""

step_ended = _of_step("ended")
"""Set: episodes of the step that have ended."""

step_started = _of_step("started")
"""Hash: episode of the step -> Unix time of its first start."""

step_durations = _of_step("durations")
"""Hash: episode of the step that has ended -> its active seconds."""

OF_STEP = (step_demand, step_running, step_ended, step_started, step_durations)
"""Every key of a step."""
