"""Run one episode to its end, whoever asks: the activity, or a worker that adopts it after a restart.

Invariant: one generation of an episode may speak at a time. A generation's call records lie under a name of its own,
so that an episode which is started again from zero never mixes with what its predecessor said.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path

from redis.asyncio import Redis

from activities.services import Services, as_bytes
from infra import demand, keys
from infra.episodes.launch import EpisodeLaunch, Exit, Running, SupervisorLost, launch_or_adopt, stop, wait
from infra.episodes.workspace import pack_workspace
from infra.harness.adapters import harness_named
from infra.sandbox.bubblewrap import Bubblewrap
from infra.tasks.harbor import Task, list_tasks, load_task
from workflows import names
from workflows.contracts import EpisodeExit, EpisodeInput, Outcome

MODEL = "gyre-policy"
LEASE_S = 30.0
GRACE_S = 5.0
KEY_SPARE_S = 900.0
"""Seconds for which a key outlives the wall limit, should nobody revoke it."""


class LeaseHeld(RuntimeError):
    """An older generation still holds its lease, on another host."""


def generation_name(episode: str, generation: int) -> str:
    """Name of a generation's call records, lease and counts."""
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

    async def run(self, episode: EpisodeInput, on_beat: Callable[[], None]) -> EpisodeExit:
        """To the end. Cancelling leaves the harness running, to be adopted; ``cancel`` ends it."""
        name = self.name(episode)
        await demand.episode_started(self._redis, episode.run, episode.step, name)
        generation = int(await self._redis.get(keys.generation_of(name)) or 1)
        while True:
            try:
                exit_ = await self._run_generation(episode, generation, on_beat)
                break
            except SupervisorLost:
                if generation > episode.restarts:
                    raise
                generation += 1
        return await self._ended(episode, generation, exit_)

    async def cancel(self, episode: EpisodeInput) -> None:
        """End the harness, if it runs here, and everything that its key allows."""
        generation = int(await self._redis.get(keys.generation_of(self.name(episode))) or 1)
        with contextlib.suppress(SupervisorLost):  # then nothing of it runs any more
            await stop(await self._launch(episode, generation))
        await self._ended_counts(episode)

    async def _run_generation(self, episode: EpisodeInput, generation: int, on_beat: Callable[[], None]) -> Exit:
        await self._take_over(self.name(episode), generation)
        return await wait(await self._launch(episode, generation), on_beat)

    async def _launch(self, episode: EpisodeInput, generation: int) -> Running:
        """Start or adopt; a fresh key is made for the case that it starts, and revoked when it wasn't needed."""
        name = generation_name(self.name(episode), generation)
        task = await asyncio.to_thread(task_at, episode.task_set, episode.task)
        settings, budget, sampling = self._services.settings, episode.budget, episode.sampling
        api_key = f"gyre-{secrets.token_urlsafe(24)}"
        stands_for = keys.EpisodeKey(
            episode=name,
            generation=generation,
            min_version=episode.min_version,
            max_version=episode.max_version,
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            context_limit=sampling.context_limit,
            max_calls=sampling.max_calls,
        )
        lifetime = int(budget.wall_s + KEY_SPARE_S)
        await self._redis.set(keys.key(api_key), stands_for.model_dump_json(), ex=lifetime)
        launch = EpisodeLaunch(
            episode=name,
            generation=generation,
            folder=self.folder(episode),
            task=task,
            api_key=api_key,
            model=MODEL,
            proxy_socket=settings.proxy_socket,
            redis_url=settings.redis,
            budget_s=budget.active_s,
            wall_limit_s=budget.wall_s,
            grace_s=GRACE_S,
            lease_ttl_s=LEASE_S,
        )
        running = await launch_or_adopt(launch, harness_named(episode.harness, settings.harnesses), self._sandbox)
        if running.mode == "started":
            await self._redis.set(keys.api_key_of(name), api_key, ex=lifetime)
        else:
            await self._redis.delete(keys.key(api_key))
        return running

    async def _take_over(self, episode: str, generation: int) -> None:
        """Make ``generation`` the one that may speak; the one before must have ended, or lost its lease."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(keys.generation_of(episode), generation)
            pipe.set(keys.generation_of(generation_name(episode, generation)), generation)
            await pipe.execute()
        if generation == 1:
            return
        before = keys.lease(generation_name(episode, generation - 1))
        deadline = asyncio.get_running_loop().time() + LEASE_S + GRACE_S
        while await self._redis.exists(before):
            if asyncio.get_running_loop().time() > deadline:
                raise LeaseHeld(f"{episode}: generation {generation - 1} still holds its lease")
            await asyncio.sleep(0.5)

    async def _ended(self, episode: EpisodeInput, generation: int, exit_: Exit) -> EpisodeExit:
        name = generation_name(self.name(episode), generation)
        if (api_key := await self._redis.getdel(keys.api_key_of(name))) is not None:
            await self._redis.delete(keys.key(as_bytes(api_key).decode()))
        calls = int(await self._redis.llen(keys.calls(name)))
        truncated = await self._redis.get(keys.truncated(name))
        workspace = self.folder(episode) / "workspace"
        outcome, detail = outcome_of(exit_, as_bytes(truncated).decode() if truncated else "")
        gradeable = workspace.is_dir() and (outcome in GRADED or (outcome is Outcome.HARNESS_FAILED and calls > 0))
        ref = ""
        if gradeable:
            packed = await asyncio.to_thread(pack_workspace, workspace)
            ref = await asyncio.to_thread(self._services.blobs.put, packed)
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
