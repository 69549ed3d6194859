"""`gyre why EPISODE`: one episode, from the seal in the blob store, its group's workflow and the call records.

A sealed episode needs no stack: what only Temporal knows (when it was queued) is then left out.
"""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

import orjson
from redis.exceptions import RedisError

from activities.trajectories import unpack_records
from infra.settings import Settings
from infra.state import keys
from infra.state.blobs import BlobMissing, BlobStore
from infra.state.record_names import config_name, step_name
from infra.state.redis import as_bytes, text
from infra.temporal import TemporalUnreachable
from trajectory.records import CallRecord, RecordError, decode_chain
from workers.errors import UsageError
from workers.records.regrade import later_verdicts, verdict_line
from workers.why import ended
from workers.why.attempts import moments, restarted
from workers.why.sight import Sight, look
from workers.why.steps import episode_of, episode_waits, step_answer
from workers.why.temporal import Unanswered
from workers.why.wait import Answer
from workflows import names
from workflows.contracts.results import EpisodeResult

NAME: Final = re.compile(r"(?P<run>[a-z0-9-]+)/(?P<step>\d+)/(?P<group>\d+)/(?P<index>\d+)(?:~\d+)?")


@dataclass(frozen=True)
class Place:
    run: str
    step: int
    group: int
    index: int

    @property
    def episode(self) -> str:
        return names.episode_name(self.run, self.step, self.group, self.index)


def place_of(name: str) -> Place | None:
    """The episode that is meant, with or without leading zeros and generation; None when it is no episode's name."""
    match = NAME.fullmatch(name)
    return Place(match["run"], int(match["step"]), int(match["group"]), int(match["index"])) if match else None


async def episode_answer(settings: Settings, place: Place) -> Answer:
    """Raises UsageError when there is no such episode."""
    blobs = BlobStore(settings.blobs)
    group = _group_seals(blobs, place)
    seal = next((seal for seal in group if seal["episode"] == place.episode), None)
    async with AsyncExitStack() as stack:
        try:
            sight = await stack.enter_async_context(look(settings))
        except (TemporalUnreachable, UsageError):
            if seal is None:
                raise
            sight = None
        if seal is not None:
            return await _sealed(blobs, place, seal, group, sight)
        assert sight is not None
        return await _unsealed(sight, place)


async def _sealed(
    blobs: BlobStore, place: Place, seal: dict[str, Any], group: list[dict[str, Any]], sight: Sight | None
) -> Answer:
    fields = EpisodeResult.model_fields
    result = EpisodeResult.model_validate({name: seal[name] for name in fields if name in seal})
    records = _decoded(unpack_records(blobs.get(seal["records_ref"])))
    answer = _told(place, result, records, _budget(blobs, place.run))
    answer.facts += ended.standing(result, [one["reward"] for one in group], _trains(blobs, place))
    verdicts = later_verdicts(blobs, place.run, place.step).get(result.exit.records or result.episode, [])
    answer.facts += [verdict_line(verdict) for verdict in verdicts]
    answer.facts.insert(0, f"task {seal['task']}")
    answer.data |= {"task": seal["task"], "verdicts": verdicts}
    if sight is None:
        answer.facts.append("Temporal is not there: when it was queued and graded is not told")
    else:
        answer.timeline += moments(await sight.temporal.history(_group_id(place)), place.index)
    answer.timeline.sort(key=lambda moment: moment.at)
    return answer


async def _unsealed(sight: Sight, place: Place) -> Answer:
    """It has not been processed: it waits, runs, or has ended before its siblings."""
    described = await sight.temporal.describe(_group_id(place))
    if described is None:
        return await _before_its_group(sight, place)
    answer = Answer(about=f"episode {place.episode}")
    result = None
    try:
        told = await sight.temporal.ask(_group_id(place), "episodes", list[EpisodeResult])
        result = next((one for one in told if one.episode == place.episode), None)
    except Unanswered as error:
        answer.facts.append(f"what its group says is not known: {error}")
    records = await _recorded(sight, place, result)
    mine = [one for one in described.activities if one.id.partition("-")[2] == f"{place.index:02d}"]
    timeline = moments(await sight.temporal.history(_group_id(place)), place.index)
    if not timeline:
        raise UsageError(f"there is no episode {place.episode!r}: `gyre episodes {place.run}` lists those of its run")
    if result is not None:
        facts = answer.facts
        answer = _told(place, result, records, _budget(sight.blobs, place.run))
        answer.facts = facts + answer.facts
    else:
        if not described.running:
            answer.facts.append(f"no outcome was recorded: the workflow of its group is {described.status}")
        answer.facts += ended.calls_made(records)
        answer.timeline += ended.call_moments(records)
    await sight.learn_queues({one.queue for one in described.activities})
    waits = await episode_waits(sight, place.run, [described])
    of_group = [wait for wait in waits if not wait.what.startswith("episode ")]
    if mine:
        answer.waits = [wait for wait in waits if wait.what == f"episode {episode_of(mine[0])}"]
    elif result is not None and of_group:
        answer.waits = of_group
    elif result is not None and described.running:
        answer.facts.append(f"its group is processed when its siblings have ended: {len(waits)} have not")
        answer.waits = waits
    answer.waits = [*sight.faults, *answer.waits]
    answer.timeline = sorted([*answer.timeline, *timeline], key=lambda moment: moment.at)
    return answer


async def _before_its_group(sight: Sight, place: Place) -> Answer:
    """Its group has not been started, or there is no such episode."""
    step = await step_answer(sight, place.run, place.step)
    missing = f"there is no episode {place.episode!r}: `gyre episodes {place.run}` lists those of its run"
    if step is None or not step.waits:
        raise UsageError(missing)
    about = f"episode {place.episode}"
    if not step.data:
        facts = ["its group has not been started, if there is one: its step does not say how many it has", *step.facts]
        return Answer(about=about, facts=facts, waits=[*sight.faults, *step.waits])
    if place.group >= int(step.data["groups"]) or place.index >= int(step.data.get("group_size", 0)):
        raise UsageError(missing)
    waits = [wait for wait in step.waits if "groups of" in wait.what or "await_turn" in wait.owner]
    facts = ["queued: its group has not been started"]
    return Answer(about=about, facts=facts, waits=[*sight.faults, *waits])


def _told(place: Place, result: EpisodeResult, records: list[CallRecord], budget: dict[str, float]) -> Answer:
    return Answer(
        about=f"episode {place.episode}",
        facts=ended.reasons(result, budget) + ended.calls_made(records),
        timeline=[*restarted(result.exit.restarts), *ended.call_moments(records)],
        data=ended.as_data(result, records),
    )


async def _recorded(sight: Sight, place: Place, result: EpisodeResult | None) -> list[CallRecord]:
    """The call records as they lie in Redis."""
    try:
        name = result.exit.records if result is not None else ""
        if not name:
            current = await sight.redis.get(keys.records_of(place.episode))
            name = text(current) if current else place.episode
        return _decoded([as_bytes(data) for data in await sight.redis.lrange(keys.calls(name), 0, -1)])
    except (RedisError, OSError):
        return []


def _decoded(data: list[bytes]) -> list[CallRecord]:
    """Nothing of a broken chain: the result's detail says what is wrong with it."""
    try:
        return decode_chain(data)
    except RecordError:
        return []


def _group_seals(blobs: BlobStore, place: Place) -> list[dict[str, Any]]:
    folder = PurePosixPath("episodes") / place.episode
    return [orjson.loads(blobs.get_named(name)) for name in blobs.names(str(folder.parent))]


def _group_id(place: Place) -> str:
    return names.group_id(place.run, place.step, place.group)


def _budget(blobs: BlobStore, run: str) -> dict[str, float]:
    try:
        budget: dict[str, float] = orjson.loads(blobs.get_named(config_name(run))).get("budget", {})
    except BlobMissing:
        return {}
    return budget


def _trains(blobs: BlobStore, place: Place) -> bool:
    """Whether the step trains; one that isn't over is taken to."""
    try:
        return bool(orjson.loads(blobs.get_named(step_name(place.run, place.step)))["train"])
    except BlobMissing:
        return True
