"""An open step: its episodes, the micro-steps that wait, the claims that run, what its workflow itself waits for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from infra.state.blobs import BlobMissing
from infra.state.record_names import step_name
from workers.progress import step_line
from workers.why.episodes import episode_wait
from workers.why.pending import activity_wait, task_waits
from workers.why.sight import Sight
from workers.why.spoken import Spoken, read_episodes
from workers.why.temporal import Described, Pending, Unanswered
from workers.why.wait import Answer, Wait
from workflows import names
from workflows.contracts.results import StepResult

OF_EPISODES = ("run_episode", "grade_episode")


@dataclass(frozen=True)
class Progress:
    """What the step says of itself; the defaults are those of a step that says nothing."""

    phase: str = "not known"
    paused: bool = False
    train: bool = True
    version: int = -1
    groups: int = 0
    groups_done: int = 0
    group_size: int = 0
    micro_steps: int = 0
    waiting: int = 0
    claimed: dict[str, int] | None = None
    """Cell -> micro-steps of its claim; None when it isn't known who trains."""
    core: str = ""

    @classmethod
    def read(cls, said: dict[str, Any]) -> Progress:
        names_here = {"waiting": "waiting_micro_steps"}
        fields = cls.__dataclass_fields__
        return cls(**{name: said[names_here.get(name, name)] for name in fields if names_here.get(name, name) in said})


async def step_answer(sight: Sight, run: str, step: int) -> Answer | None:
    """None when the run has no such step."""
    workflow = names.step_id(run, step)
    described = await sight.temporal.describe(workflow)
    if described is None:
        return None
    answer = Answer(about=f"step {run}/{step}")
    if not described.running:
        answer.facts = await _ended(sight, run, step, described)
        return answer
    progress = Progress()
    if not sight.silence:
        try:
            said = await sight.temporal.ask(workflow, "progress", dict[str, Any])
            progress, answer.data = Progress.read(said), said
        except Unanswered as error:
            answer.facts.append(f"its progress is not known: {error}")
    groups = await asyncio.gather(*(sight.temporal.describe(group) for group in described.children))
    running = [group for group in groups if group is not None and group.running]
    now, queues = sight.now, sight.queues
    pending = [one for of in (described, *running) for one in of.activities]
    await sight.learn_queues({one.queue for one in pending})
    if answer.data:
        answer.facts.append(_fact(progress))
    answer.waits += task_waits(answer.about, workflow, described.task, sight.control, now)
    answer.waits += [activity_wait(_what(answer.about, one), one, queues, now) for one in described.activities]
    answer.waits += _unstarted(answer.about, described, progress)
    answer.waits += await episode_waits(sight, run, running)
    if progress.train and answer.data:
        answer.waits += training_waits(sight, answer.about, workflow, progress)
    return answer


async def _ended(sight: Sight, run: str, step: int, described: Described) -> list[str]:
    at = f" at {described.closed:%Y-%m-%d %H:%M:%S} UTC" if described.closed is not None else ""
    why = await sight.temporal.closing(described.id)
    facts = [f"{described.status}{at}" + (f": {why}" if why else "")]
    try:
        result = StepResult.model_validate_json(sight.blobs.get_named(step_name(run, step)))
    except BlobMissing:
        return facts
    facts.append(step_line(result))
    if result.groups_without_gradient:
        reasons = ", ".join(f"{name}={count}" for name, count in sorted(result.groups_without_gradient.items()))
        facts.append(f"groups without gradient: {reasons}")
    return facts


async def episode_waits(sight: Sight, run: str, groups: list[Described]) -> list[Wait]:
    """One wait for each unfinished episode of groups that run, and for each group that waits for something else."""
    around = sight.around(sight.run_config(run))
    pending = {episode_of(one): one for group in groups for one in group.activities if one.activity in OF_EPISODES}
    started = [name for name, one in pending.items() if one.activity == "run_episode" and one.state == "started"]
    spoken = await _spoken(sight, started)
    waits = [episode_wait(name, one, spoken.get(name), around) for name, one in sorted(pending.items())]
    for group in groups:
        what = f"group {group.id.removeprefix('gyre/')}"
        waits += task_waits(what, group.id, group.task, sight.control, sight.now)
        others = [one for one in group.activities if one.activity not in OF_EPISODES]
        waits += [activity_wait(what, one, sight.queues, sight.now, kind="group") for one in others]
    return waits


async def _spoken(sight: Sight, episodes: list[str]) -> dict[str, Spoken]:
    if sight.shared.fault:
        return {}
    try:
        return await read_episodes(sight.redis, episodes)
    except (RedisError, OSError):  # it went away between two reads: the next look says so
        return {}


def episode_of(pending: Pending) -> str:
    """Name of the episode that a group's activity is for; its index is the end of the activity's id."""
    run, _, step, _, group = pending.workflow.removeprefix("gyre/").rsplit("/", 4)
    return names.episode_name(run, int(step), int(group), int(pending.id.rpartition("-")[2]))


def _what(step: str, pending: Pending) -> str:
    if pending.activity == "train_micro_steps":
        return f"claim of {pending.queue.removeprefix('gyre.cell.')} for {step}"
    return step


def _fact(progress: Progress) -> str:
    kind = f"trains version {progress.version}" if progress.train else f"evaluates version {progress.version}"
    said = f"{kind}, {progress.phase}; {progress.groups_done} of {progress.groups} groups done"
    if progress.train:
        said += f", {progress.micro_steps} micro-steps so far"
    return said + ("; paused" if progress.paused else "")


def _unstarted(what: str, described: Described, progress: Progress) -> list[Wait]:
    """Groups that have not been started."""
    left = progress.groups - progress.groups_done - len(described.children)
    if left <= 0 or described.of("await_turn") or described.of("open_step"):
        return []
    run = what.removeprefix("step ").rpartition("/")[0]
    if progress.paused:
        reason, ends = "paused: no group is started", f"a person (`gyre resume {run}`)"
    else:
        reason, ends = "as many groups run as a step runs at once", "one of the groups that run is done"
    about = f"{left} groups of {what}, {left * progress.group_size} episodes"
    return [Wait(what=about, owner=described.id, reason=reason, ends=ends)]


def training_waits(sight: Sight, what: str, workflow: str, progress: Progress) -> list[Wait]:
    """What the step's training waits for, besides the claims that run."""
    state, claimed = sight.scheduler, progress.claimed or {}
    all_done = progress.groups_done == progress.groups
    if state is not None and progress.version > state.version and not claimed:
        reason = f"version {progress.version} is not there yet: the update of step {_step_before(sight, what)} makes it"
        ends = "that update is committed"
        return [Wait(what=f"training of {what}", owner=names.scheduler_id(state.pool), reason=reason, ends=ends)]
    if progress.waiting:
        about = f"{progress.waiting} micro-steps of {what}"
        if claimed:
            reason = "all its trainers are busy: " + ", ".join(f"{cell} has {count}" for cell, count in claimed.items())
            return [Wait(what=about, owner=workflow, reason=reason, ends="a claim ends (see the claims)")]
        return [_no_trainer(sight, about, "no cell trains the step")]
    if not all_done:
        reason = "further micro-steps come when groups are done" if progress.micro_steps else "no group is done yet"
        return [Wait(what=f"training of {what}", owner=workflow, reason=reason, ends="a group is done")]
    if not progress.core and not any(claimed.values()) and progress.phase in {"rollout", "training"}:
        return [_no_trainer(sight, f"update of {what}", "no cell is its core")]
    return []


def _no_trainer(sight: Sight, what: str, reason: str) -> Wait:
    state = sight.scheduler
    pool = state.pool if state is not None else sight.settings.pool
    because = f": {state.reason}" if state is not None else ""
    ends = "the scheduler gives it a cell, and that cell is ready"
    return Wait(what=what, owner=names.scheduler_id(pool), reason=reason + because, ends=ends)


def _step_before(sight: Sight, what: str) -> str:
    step = int(what.rpartition("/")[2])
    state: Any = sight.scheduler
    older = [one.opened.step for one in state.steps if one.opened.train and one.opened.step < step]
    return str(max(older)) if older else "before"
