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
from infra.state.record_names import step_name
from infra.state.redis import as_bytes, text
from infra.temporal import TemporalUnreachable
from trajectory.records import CallRecord, RecordError, decode_chain
from workers.errors import UsageError
from workers.records.regrade import later_verdicts, verdict_line
from workers.why import episode_outcome as outcome
from workers.why.snapshot import Snapshot, run_config, take_snapshot
from workers.why.steps import episode_of, episode_waits, step_answer
from workers.why.temporal import Unanswered
from workers.why.wait import Answer
from workflows import names
from workflows.contracts.results import EpisodeResult

NAME: Final = re.compile(r"(?P<run>[a-z0-9-]+)/(?P<step>\d+)/(?P<group>\d+)/(?P<index>\d+)(?:~\d+)?")


@dataclass(frozen=True)
class EpisodePath:
    run: str
    step: int
    group: int
    index: int

    @property
    def episode(self) -> str:
        return names.episode_name(self.run, self.step, self.group, self.index)

    @property
    def group_id(self) -> str:
        return names.group_id(self.run, self.step, self.group)

    @property
    def missing(self) -> UsageError:
        return UsageError(f"there is no episode {self.episode!r}: `gyre episodes {self.run}` lists those of its run")


def path_of(name: str) -> EpisodePath | None:
    """The episode that is meant, with or without leading zeros and generation; None when it is no episode's name."""
    match = NAME.fullmatch(name)
    return EpisodePath(match["run"], *(int(match[part]) for part in ("step", "group", "index"))) if match else None


async def episode_answer(settings: Settings, path: EpisodePath) -> Answer:
    """Raises UsageError when there is no such episode."""
    blobs = BlobStore(settings.blobs)
    folder = PurePosixPath("episodes") / path.episode
    group = [orjson.loads(blobs.get_named(name)) for name in blobs.names(str(folder.parent))]
    seal = next((seal for seal in group if seal["episode"] == path.episode), None)
    snapshot = None
    async with AsyncExitStack() as stack:
        try:
            snapshot = await stack.enter_async_context(take_snapshot(settings))
        except (TemporalUnreachable, UsageError):
            if seal is None:
                raise
        if seal is not None:
            return await _sealed(blobs, path, seal, [sibling["reward"] for sibling in group], snapshot)
        assert snapshot is not None
        return await _unsealed(snapshot, path)


async def _sealed(
    blobs: BlobStore, path: EpisodePath, seal: dict[str, Any], rewards: list[float | None], snapshot: Snapshot | None
) -> Answer:
    result = EpisodeResult.model_validate({name: seal[name] for name in EpisodeResult.model_fields if name in seal})
    answer = _of_result(blobs, path, result, _decoded(unpack_records(blobs.get(seal["records_ref"]))))
    answer.facts += outcome.standing(result, rewards, _trains(blobs, path))
    verdicts = later_verdicts(blobs, path.run, path.step).get(result.exit.records or result.episode, [])
    answer.facts += [verdict_line(verdict) for verdict in verdicts]
    answer.facts.insert(0, f"task {seal['task']}")
    answer.data |= {"task": seal["task"], "verdicts": verdicts}
    if snapshot is None:
        answer.facts.append("Temporal is not there: when it was queued and graded is not told")
    else:
        answer.timeline += outcome.history_moments(await snapshot.temporal.history(path.group_id), path.index)
    answer.timeline.sort(key=lambda moment: moment.at)
    return answer


async def _unsealed(snapshot: Snapshot, path: EpisodePath) -> Answer:
    """It has not been processed: it waits, runs, or has ended before its siblings."""
    described = await snapshot.temporal.describe(path.group_id)
    if described is None:
        return await _before_its_group(snapshot, path)
    answer = Answer(about=f"episode {path.episode}")
    results: list[EpisodeResult] = []
    try:
        results = await snapshot.temporal.ask(path.group_id, "episodes", list[EpisodeResult])
    except Unanswered as error:
        answer.facts.append(f"what its group says is not known: {error}")
    result = next((result for result in results if result.episode == path.episode), None)
    records = await _recorded(snapshot, path, result)
    timeline = outcome.history_moments(await snapshot.temporal.history(path.group_id), path.index)
    if not timeline:
        raise path.missing
    if result is not None:
        unanswered = answer.facts
        answer = _of_result(snapshot.blobs, path, result, records)
        answer.facts = unanswered + answer.facts
    else:
        if not described.running:
            answer.facts.append(f"no outcome was recorded: the workflow of its group is {described.status}")
        answer.facts += outcome.calls_made(records)
        answer.timeline += outcome.call_moments(records)
    await snapshot.learn_queues(described)
    waits = await episode_waits(snapshot, path.run, [described])
    of_group = [wait for wait in waits if not wait.what.startswith("episode ")]
    mine = [activity for activity in described.activities if activity.id.partition("-")[2] == f"{path.index:02d}"]
    if mine:
        answer.waits = [wait for wait in waits if wait.what == f"episode {episode_of(mine[0])}"]
    elif result is not None and of_group:
        answer.waits = of_group
    elif result is not None and described.running:
        answer.facts.append(f"its group is processed when its siblings have ended: {len(waits)} have not")
        answer.waits = waits
    answer.waits = [*snapshot.faults, *answer.waits]
    answer.timeline = sorted([*answer.timeline, *timeline], key=lambda moment: moment.at)
    return answer


async def _before_its_group(snapshot: Snapshot, path: EpisodePath) -> Answer:
    """Its group has not been started, or there is no such episode."""
    step = await step_answer(snapshot, path.run, path.step)
    if step is None or not step.waits:
        raise path.missing
    if not step.data:
        facts = ["its group has not been started, if there is one: its step does not say how many it has", *step.facts]
        waits = step.waits
    elif path.group >= int(step.data["groups"]) or path.index >= int(step.data.get("group_size", 0)):
        raise path.missing
    else:
        facts = ["queued: its group has not been started"]
        waits = [wait for wait in step.waits if "groups of" in wait.what or "await_turn" in wait.owner]
    return Answer(about=f"episode {path.episode}", facts=facts, waits=[*snapshot.faults, *waits])


def _of_result(blobs: BlobStore, path: EpisodePath, result: EpisodeResult, records: list[CallRecord]) -> Answer:
    budget = run_config(blobs, path.run).get("budget", {})
    return Answer(
        about=f"episode {path.episode}",
        facts=outcome.reasons(result, budget) + outcome.calls_made(records),
        timeline=[*outcome.restarted(result.exit.restarts), *outcome.call_moments(records)],
        data=outcome.as_data(result, records),
    )


async def _recorded(snapshot: Snapshot, path: EpisodePath, result: EpisodeResult | None) -> list[CallRecord]:
    """The call records as they lie in Redis."""
    try:
        name = result.exit.records if result is not None else ""
        if not name:
            current = await snapshot.redis.get(keys.records_of(path.episode))
            name = text(current) if current else path.episode
        return _decoded([as_bytes(data) for data in await snapshot.redis.lrange(keys.calls(name), 0, -1)])
    except (RedisError, OSError):
        return []


def _decoded(data: list[bytes]) -> list[CallRecord]:
    """Nothing of a broken chain: the result's detail says what is wrong with it."""
    try:
        return decode_chain(data)
    except RecordError:
        return []


def _trains(blobs: BlobStore, path: EpisodePath) -> bool:
    """Whether the step trains; one that isn't over is taken to."""
    try:
        return bool(orjson.loads(blobs.get_named(step_name(path.run, path.step)))["train"])
    except BlobMissing:
        return True
