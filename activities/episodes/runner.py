"""Run one episode to its end, whoever asks: the activity, or a worker that adopts it after a restart.

Invariant: one generation of an episode may speak at a time. An episode that is started again from zero keeps its call
records under a name of that generation's own, so they never mix with what its predecessor said; one that its harness
resumes goes on under its predecessor's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from redis.asyncio import Redis

from activities.services import Services
from infra.episodes.launch import (
    EpisodeLaunch,
    Exit,
    Running,
    SupervisorLost,
    can_resume,
    dead_supervisor,
    launch_or_adopt,
    stop,
    wait,
)
from infra.episodes.workspace import pack_workspace
from infra.harness.registry import harness_named
from infra.sandbox.bubblewrap import Bubblewrap
from infra.state import demand, durations, keys
from infra.state.redis import text
from infra.tasks.harbor import Task, list_tasks, load_task
from workflows import names
from workflows.contracts.results import EpisodeExit, EpisodeInput, Outcome

MODEL = "gyre-policy"
LEASE_S = 30.0
GRACE_S = 5.0
KEY_SPARE_S = 900.0
"""Seconds for which a key outlives the wall limit, should nobody revoke it."""


class LeaseHeld(RuntimeError):
    """An older generation still holds its lease, on another host."""


@dataclass(frozen=True)
class Start:
    """A generation of an episode."""

    name: str
    """Of the episode."""
    generation: int
    records: str
    """Name of its call records, lease and counts."""

    @property
    def resumes(self) -> bool:
        return self.records != generation_name(self.name, self.generation)


def generation_name(episode: str, generation: int) -> str:
    """Name of the call records, lease and counts of a generation that starts from zero."""
    return episode if generation == 1 else f"{episode}~{generation}"


def task_at(task_set: str, index: int) -> Task:
    """Task ``index`` of a set, in sorted order; the index wraps around, so that small sets can be drawn from often."""
    tasks = list_tasks(Path(task_set))
    return load_task(Path(task_set) / tasks[index % len(tasks)])


class EpisodeRunner:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._redis: Redis = services.redis
        self._sandbox = Bubblewrap()

    def folder(self, episode: EpisodeInput) -> Path:
        return self._services.settings.episodes / self.name(episode)

    @staticmethod
    def name(episode: EpisodeInput) -> str:
        return names.episode_name(episode.run, episode.step, episode.group, episode.index)

    async def run(self, episode: EpisodeInput) -> EpisodeExit:
        """To the end. Cancelling leaves the harness running, to be adopted; ``cancel`` ends it."""
        name = self.name(episode)
        await demand.episode_started(self._redis, episode.run, episode.step, name)
        start = await self._current(name)
        while True:
            try:
                exit_ = await self._run_generation(episode, start)
                break
            except SupervisorLost as lost:
                if start.generation > episode.restarts:
                    await self._note_lost(start, lost, "it is not started again")
                    raise
                following = await self._next(episode, start)
                how = "goes on in its workspace" if following.resumes else "starts from zero"
                await self._note_lost(start, lost, f"generation {following.generation} {how}")
                start = following
        return await self._ended(episode, start, exit_)

    async def cancel(self, episode: EpisodeInput) -> None:
        """End the harness, if it runs here, and everything that its key allows."""
        start = await self._current(self.name(episode))
        with contextlib.suppress(SupervisorLost):  # then nothing of it runs any more
            await stop(await self._launch(episode, start))
        await self._ended_counts(episode)

    async def _current(self, name: str) -> Start:
        """The generation that may speak now."""
        generation, records = await self._redis.mget(keys.generation_of(name), keys.records_of(name))
        number = int(generation or 1)
        return Start(name, number, text(records) if records else generation_name(name, number))

    async def _next(self, episode: EpisodeInput, lost: Start) -> Start:
        """What follows a lost generation: the harness's resume where it has one and its files are here, else zero.

        Without a single answer a harness may not have begun its conversation, and there would be nothing to go on with.
        """
        if episode.restart == "resume" and await self._redis.llen(keys.calls(lost.records)):
            launch = await self._describe(episode, lost, api_key="")
            harness = harness_named(episode.harness, self._services.settings.harnesses)
            if can_resume(self.folder(episode), harness, launch.session()):
                return Start(lost.name, lost.generation + 1, lost.records)
        return Start(lost.name, lost.generation + 1, generation_name(lost.name, lost.generation + 1))

    async def _note_lost(self, lost: Start, why: SupervisorLost, then: str) -> None:
        """For whoever asks later: nothing else remembers a generation that was lost."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        line = f"{at} generation {lost.generation} was lost: {why}"[:240] + f"; {then}"
        await self._redis.hset(keys.restarts(lost.name), str(lost.generation), line)

    async def _run_generation(self, episode: EpisodeInput, start: Start) -> Exit:
        await self._take_over(start, self.folder(episode))
        return await wait(await self._launch(episode, start))

    async def _launch(self, episode: EpisodeInput, start: Start) -> Running:
        """Start or adopt; a fresh key is made for the case that it starts, and revoked when it wasn't needed."""
        harness = harness_named(episode.harness, self._services.settings.harnesses)
        api_key = f"gyre-{secrets.token_urlsafe(24)}"
        launch = await self._describe(episode, start, api_key)
        stands_for = keys.EpisodeKey(
            episode=start.records,
            generation=start.generation,
            min_version=episode.min_version,
            max_version=episode.max_version,
            **dict(episode.sampling),
            harness=harness.name,
            patience_s=harness.patience_s,
            early_stream=harness.early_stream,
        )
        lifetime = int(episode.budget.wall_s + KEY_SPARE_S)
        await self._redis.set(keys.key(api_key), stands_for.model_dump_json(), ex=lifetime)
        running = await launch_or_adopt(launch, harness, self._sandbox)
        if running.mode == "started":
            before = await self._redis.get(keys.api_key_of(start.records))
            await self._redis.set(keys.api_key_of(start.records), api_key, ex=lifetime)
            if before is not None:
                await self._redis.delete(keys.key(text(before)))
        else:
            await self._redis.delete(keys.key(api_key))
        return running

    async def _describe(self, episode: EpisodeInput, start: Start, api_key: str) -> EpisodeLaunch:
        task = await asyncio.to_thread(task_at, episode.task_set, episode.task)
        settings, budget, sampling = self._services.settings, episode.budget, episode.sampling
        return EpisodeLaunch(
            episode=start.records,
            generation=start.generation,
            resume=start.resumes,
            folder=self.folder(episode),
            task=task,
            api_key=api_key,
            model=MODEL,
            context_limit=sampling.context_limit,
            max_output=sampling.max_new_tokens,
            proxy_socket=settings.proxy_socket,
            redis_url=settings.redis,
            budget_s=budget.active_s,
            wall_limit_s=budget.wall_s,
            grace_s=GRACE_S,
            lease_ttl_s=LEASE_S,
        )

    async def _take_over(self, start: Start, folder: Path) -> None:
        """Make this generation the one that may speak; the one before must have ended, or lost its lease."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(keys.generation_of(start.name), start.generation)
            pipe.set(keys.generation_of(start.records), start.generation)
            pipe.set(keys.records_of(start.name), start.records)
            await pipe.execute()
        earlier = [generation_name(start.name, number) for number in range(1, start.generation + 1)]
        deadline = asyncio.get_running_loop().time() + LEASE_S + GRACE_S
        while held := await self._older_lease(earlier, start.generation, folder):
            if asyncio.get_running_loop().time() > deadline:
                raise LeaseHeld(f"{start.name}: {held} still holds its lease")
            await asyncio.sleep(0.5)

    async def _older_lease(self, records: list[str], generation: int, folder: Path) -> str:
        """A supervisor of an older generation that may be running somewhere; "" for none."""
        for holder in await self._redis.mget([keys.lease(name) for name in records]):
            who = text(holder) if holder else ""
            if who and int(who.partition(":")[0]) < generation and who != dead_supervisor(folder):
                return who
        return ""

    async def _ended(self, episode: EpisodeInput, start: Start, exit_: Exit) -> EpisodeExit:
        name = start.records
        if (api_key := await self._redis.getdel(keys.api_key_of(name))) is not None:
            await self._redis.delete(keys.key(text(api_key)))
        calls = int(await self._redis.llen(keys.calls(name)))
        truncated = await self._redis.get(keys.truncated(name))
        restarts = await self._redis.hgetall(keys.restarts(start.name))
        workspace = self.folder(episode) / "workspace"
        outcome, detail = outcome_of(exit_, text(truncated) if truncated else "")
        gradeable = workspace.is_dir() and (outcome in GRADED or (outcome is Outcome.HARNESS_FAILED and calls > 0))
        ref = ""
        if gradeable:
            packed = await asyncio.to_thread(pack_workspace, workspace)
            ref = await asyncio.to_thread(self._services.blobs.put, packed)
        if outcome in GRADED:  # before the counts: whoever sees that it has ended, sees how long it took
            await durations.episode_took(self._redis, episode.run, episode.step, self.name(episode), exit_.active_s)
        await self._ended_counts(episode)
        return EpisodeExit(
            outcome=outcome,
            calls=calls,
            gradeable=gradeable,
            active_s=exit_.active_s,
            held_s=exit_.held_s,
            wall_s=exit_.wall_s,
            records=name,
            workspace_ref=ref,
            generation=start.generation,
            restarts=[text(restarts[lost]) for lost in sorted(restarts, key=int)],
            detail=detail[:300],
        )

    async def _ended_counts(self, episode: EpisodeInput) -> None:
        await demand.episode_ended(self._redis, episode.run, episode.step, self.name(episode))


GRADED = (Outcome.COMPLETED, Outcome.TIMED_OUT, Outcome.TRUNCATED)


def outcome_of(exit_: Exit, truncated: str) -> tuple[Outcome, str]:
    """Outcome and one line for people."""
    if exit_.reason == "timed_out":
        return Outcome.TIMED_OUT, f"budget spent after {exit_.active_s:.1f} s of active time"
    if exit_.reason == "cancelled":
        return Outcome.CANCELLED, "cancelled"
    if exit_.reason == "lease_lost":
        return Outcome.INFRA_FAILED, "another generation took the lease"
    if exit_.reason == "failed_to_start":
        return Outcome.INFRA_FAILED, f"the harness did not start: {exit_.detail}"
    if truncated:
        return Outcome.TRUNCATED, f"limit reached: {truncated}"
    if exit_.exit_code == 0:
        return Outcome.COMPLETED, ""
    return Outcome.HARNESS_FAILED, f"exit code {exit_.exit_code}: {exit_.detail}"
