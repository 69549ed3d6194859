"""An open step: its episodes, the micro-steps that wait, the claims that run, what its workflow itself waits for."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel
from redis.exceptions import RedisError

from infra.state.blobs import BlobMissing
from infra.state.record_names import step_name
from workers.progress import step_line
from workers.why.episode_state import EpisodeState, read_episodes
from workers.why.episode_waits import episode_wait
from workers.why.snapshot import Snapshot
from workers.why.temporal import Described, Pending
from workers.why.wait import Answer, Wait
from workflows import names
from workflows.contracts.results import StepResult
from workflows.scheduler import SchedulerState

OF_EPISODES = ("run_episode", "grade_episode")


class ReportedProgress(BaseModel):
    """What the step says of itself; the defaults are those of a step that says nothing."""

    phase: str = "not known"
    paused: bool = False
    train: bool = True
    version: int = -1
    groups: int = 0
    groups_done: int = 0
    group_size: int = 0
    micro_steps: int = 0
    waiting_micro_steps: int = 0
    claimed: dict[str, int] = {}
    """Cell -> micro-steps of its claim."""
    core: str = ""


async def step_answer(snapshot: Snapshot, run: str, step: int) -> Answer | None:
    """None when the run has no such step."""
    workflow = names.step_id(run, step)
    described = await snapshot.temporal.describe(workflow)
    if described is None:
        return None
    answer = Answer(about=f"step {run}/{step}")
    if not described.running:
        answer.facts = [await snapshot.ended_fact(described), *_result_facts(snapshot, run, step)]
        return answer
    answer.data = await snapshot.ask(answer, workflow, "progress", dict[str, Any], "progress") or {}
    progress = ReportedProgress.model_validate(answer.data)
    groups = await asyncio.gather(*(snapshot.temporal.describe(group) for group in described.children))
    running = [group for group in groups if group is not None and group.running]
    await snapshot.learn_queues(described, *running)
    if answer.data:
        answer.facts.append(_fact(progress))
    answer.waits += snapshot.task_waits(answer.about, described)
    answer.waits += [snapshot.activity_wait(_what(answer.about, pending), pending) for pending in described.activities]
    answer.waits += _unstarted(answer.about, described, progress)
    answer.waits += await episode_waits(snapshot, run, running)
    if progress.train and answer.data:
        answer.waits += training_waits(snapshot, answer.about, workflow, progress)
    return answer


def _result_facts(snapshot: Snapshot, run: str, step: int) -> list[str]:
    try:
        result = StepResult.model_validate_json(snapshot.blobs.get_named(step_name(run, step)))
    except BlobMissing:
        return []
    facts = [step_line(result)]
    if result.groups_without_gradient:
        reasons = ", ".join(f"{name}={count}" for name, count in sorted(result.groups_without_gradient.items()))
        facts.append(f"groups without gradient: {reasons}")
    return facts


async def episode_waits(snapshot: Snapshot, run: str, groups: list[Described]) -> list[Wait]:
    """One wait for each unfinished episode of groups that run, and for each group that waits for something else."""
    around = snapshot.around(run)
    pending = {episode_of(a): a for group in groups for a in group.activities if a.activity in OF_EPISODES}
    started = [name for name, a in pending.items() if a.activity == "run_episode" and a.state == "started"]
    states = await _episode_states(snapshot, started)
    waits = [episode_wait(name, activity, states.get(name), around) for name, activity in sorted(pending.items())]
    for group in groups:
        what = f"group {group.id.removeprefix('gyre/')}"
        waits += snapshot.task_waits(what, group)
        others = [activity for activity in group.activities if activity.activity not in OF_EPISODES]
        waits += [snapshot.activity_wait(what, activity, kind="group") for activity in others]
    return waits


async def _episode_states(snapshot: Snapshot, episodes: list[str]) -> dict[str, EpisodeState]:
    if snapshot.shared.fault:
        return {}
    try:
        return await read_episodes(snapshot.redis, episodes)
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


def _fact(progress: ReportedProgress) -> str:
    kind = f"trains version {progress.version}" if progress.train else f"evaluates version {progress.version}"
    micro_steps = f", {progress.micro_steps} micro-steps so far" if progress.train else ""
    groups = f"{progress.groups_done} of {progress.groups} groups done"
    return f"{kind}, {progress.phase}; {groups}{micro_steps}" + ("; paused" if progress.paused else "")


def _unstarted(what: str, described: Described, progress: ReportedProgress) -> list[Wait]:
    """Groups that have not been started."""
    left = progress.groups - progress.groups_done - len(described.children)
    if left <= 0 or described.of("await_turn") or described.of("open_step"):
        return []
    run = what.removeprefix("step ").rpartition("/")[0]
    if progress.paused:
        reason, ends = "paused: no group is started", f"a person (`gyre resume {run}`)"
    else:
        reason, ends = "as many groups run as a step runs at once", "one of the groups that run is done"
    return [Wait(f"{left} groups of {what}, {left * progress.group_size} episodes", described.id, reason, ends=ends)]


def training_waits(snapshot: Snapshot, what: str, workflow: str, progress: ReportedProgress) -> list[Wait]:
    """What the step's training waits for, besides the claims that run."""
    state, claimed = snapshot.scheduler, progress.claimed
    if state is not None and progress.version > state.version and not claimed:
        reason = f"version {progress.version} is not there yet: the update of step {_step_before(state, what)} makes it"
        scheduler = names.scheduler_id(state.pool)
        return [Wait(f"training of {what}", scheduler, reason, ends="that update is committed")]
    if progress.waiting_micro_steps:
        waiting = f"{progress.waiting_micro_steps} micro-steps of {what}"
        if claimed:
            reason = "all its trainers are busy: " + ", ".join(f"{cell} has {count}" for cell, count in claimed.items())
            return [Wait(waiting, workflow, reason, ends="a claim ends (see the claims)")]
        return [_no_trainer(snapshot, waiting, "no cell trains the step")]
    if progress.groups_done != progress.groups:
        reason = "further micro-steps come when groups are done" if progress.micro_steps else "no group is done yet"
        return [Wait(f"training of {what}", workflow, reason, ends="a group is done")]
    if not progress.core and not any(claimed.values()) and progress.phase in {"rollout", "training"}:
        return [_no_trainer(snapshot, f"update of {what}", "no cell is its core")]
    return []


def _no_trainer(snapshot: Snapshot, what: str, reason: str) -> Wait:
    because = f": {snapshot.scheduler.reason}" if snapshot.scheduler is not None else ""
    ends = "the scheduler gives it a cell, and that cell is ready"
    return Wait(what, names.scheduler_id(snapshot.pool), reason + because, ends=ends)


def _step_before(state: SchedulerState, what: str) -> str:
    step = int(what.rpartition("/")[2])
    older = [known.opened.step for known in state.steps if known.opened.train and known.opened.step < step]
    return str(max(older)) if older else "before"
