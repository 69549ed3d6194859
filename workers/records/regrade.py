"""`gyre regrade`: run the evaluators of recorded episodes again, on the workspaces that were preserved.

Invariant: what was recorded stays. A new verdict lies beside the old one under a name of its own; steps that were
trained keep the rewards that they were trained with. An evaluator that fails again leaves the episode excluded.

It grades in this process, with the same code and sandbox as `grade_episode`, and so needs the task set and the blob
store but no stack: an activity would need a workflow to call it, for something that changes no run.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson
from pydantic import BaseModel, ConfigDict

from activities.episodes.grading import grade_preserved
from activities.episodes.runner import task_at
from infra.episodes.grading import EvaluatorFailed, evaluator_of
from infra.episodes.workspace import WorkspaceUnusable
from infra.sandbox.bubblewrap import Bubblewrap
from infra.settings import Settings
from infra.state.blobs import BlobMissing, BlobStore
from infra.state.record_names import verdict_name
from infra.tasks.harbor import Task, TaskInvalid, list_tasks
from workers.errors import UsageError
from workers.records.episodes import sealed_episodes
from workflows.contracts.results import Outcome

AT_ONCE: Final = 4
"""Evaluators that run at once."""


class LaterVerdict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    episode: str
    records: str
    """Name of the episode's call records, as in its seal."""
    task: str
    outcome: str
    """How the episode ended; ``evaluator_failed`` when its evaluator failed this time."""
    reward: float | None
    """None: excluded."""
    details: dict[str, float] = {}
    """Every number of the evaluator's reward.json."""
    detail: str = ""
    """Why the evaluator failed."""
    evaluator: str
    """``NAME@sha256:HEX``."""
    workspace_ref: str
    at: str
    """UTC, ISO 8601."""
    by: str
    seconds: float
    """Wall time of the evaluator."""


async def regrade(
    settings: Settings,
    run: str,
    *,
    step: int | None = None,
    episode: str = "",
    outcome: str = "",
    on_verdict: Callable[[dict[str, Any], LaterVerdict], None] = lambda seal, verdict: None,
) -> list[LaterVerdict]:
    """Grade what is selected again; ``on_verdict`` hears of each, with the episode's seal.

    Episodes that never left a workspace are passed over, unless ``episode`` names one. Raises UsageError when nothing
    is selected, a task isn't what it was, or, after all others were graded, when a workspace is missing.
    """
    blobs = BlobStore(settings.blobs)
    if outcome and outcome not in list(Outcome):
        raise UsageError(f"there is no outcome {outcome!r}: {', '.join(Outcome)}")
    seals = sealed_episodes(blobs, run, step, outcome)
    if episode:
        seals = [seal for seal in seals if episode in (seal["episode"], seal["exit"]["records"])]
    selected = [seal for seal in seals if seal["exit"]["workspace_ref"]]
    if not selected:
        which = f"episode {episode}" if episode else f"run {run!r}" + (f" step {step}" if step is not None else "")
        left = "the selected episodes left no workspace" if seals else "no episode is selected"
        raise UsageError(f"{which}: {left}; `gyre episodes {run}` lists them with their outcomes")
    tasks = {str(seal["task"]): _task(str(seal["task"])) for seal in selected}
    for seal in selected:
        _same_task(seal, tasks[seal["task"]])

    slots, sandbox, missing = asyncio.Semaphore(AT_ONCE), Bubblewrap(), list[str]()

    async def grade(seal: dict[str, Any]) -> LaterVerdict | None:
        async with slots:
            try:
                workspace = await asyncio.to_thread(blobs.get, seal["exit"]["workspace_ref"])
            except (BlobMissing, ValueError) as error:  # ValueError: damaged
                missing.append(f"{seal['episode']} ({error.args[0]})")
                return None
            verdict = await _judge(seal, tasks[seal["task"]], workspace, settings.root / "grading", sandbox)
        own = f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{uuid.uuid4().hex[:8]}"
        blobs.put_named(verdict_name(verdict.records, own), verdict.model_dump_json(indent=1).encode())
        on_verdict(seal, verdict)
        return verdict

    verdicts = await asyncio.gather(*(grade(seal) for seal in selected))
    if missing:
        raise UsageError(f"the preserved workspace is missing or damaged of {', '.join(sorted(missing))}")
    return [verdict for verdict in verdicts if verdict is not None]


def later_verdicts(blobs: BlobStore, run: str, step: int | None) -> dict[str, list[dict[str, Any]]]:
    """Every verdict that was given later, oldest first, by the name of the episode's call records."""
    prefix = f"verdicts/{run}" + (f"/{step:06d}" if step is not None else "")
    verdicts: dict[str, list[dict[str, Any]]] = {}
    for name in blobs.names(prefix):
        verdict = orjson.loads(blobs.get_named(name))
        verdicts.setdefault(verdict["records"], []).append(verdict)
    return verdicts


def verdict_line(verdict: dict[str, Any]) -> str:
    reward = "excluded" if verdict["reward"] is None else f"{verdict['reward']:.2f}"
    detail = f", {verdict['detail']}" if verdict["detail"] else ""
    return (
        f"regraded {verdict['at']} by {verdict['by']}: {verdict['outcome']}, reward {reward}, "
        f"evaluator {short_evaluator(verdict['evaluator'])}{detail}"
    )


def short_evaluator(evaluator: str) -> str:
    """``NAME@sha256:HEX`` with the beginning of its digest."""
    name, _, digest = evaluator.partition("@sha256:")
    return f"{name}@{digest[:12]}" if digest else name


async def _judge(
    seal: dict[str, Any], task: Task, workspace: bytes, scratch: Path, sandbox: Bubblewrap
) -> LaterVerdict:
    started, clock = datetime.now(UTC), asyncio.get_running_loop().time
    before = clock()
    about = {
        "episode": seal["episode"],
        "records": seal["exit"]["records"] or seal["episode"],
        "task": seal["task"],
        "evaluator": await asyncio.to_thread(evaluator_of, task),
        "workspace_ref": seal["exit"]["workspace_ref"],
        "at": started.isoformat(timespec="milliseconds"),
        "by": f"{_user()}@{socket.gethostname()}",
    }
    try:
        graded = await grade_preserved(task, workspace, scratch, sandbox)
    except (EvaluatorFailed, WorkspaceUnusable) as error:
        failed = {"outcome": Outcome.EVALUATOR_FAILED.value, "reward": None, "detail": str(error)[:300]}
        return LaterVerdict(**about, **failed, seconds=clock() - before)
    ended = seal["exit"]["outcome"]
    return LaterVerdict(**about, outcome=ended, reward=graded.reward, details=graded.details, seconds=graded.seconds)


def _task(sealed: str) -> Task:
    """The task of a seal, SET#INDEX."""
    task_set, _, index = sealed.rpartition("#")
    try:
        if not list_tasks(Path(task_set)):
            raise UsageError(f"{task_set} holds no task folders any more: it is needed for its evaluators")
        return task_at(task_set, int(index))
    except TaskInvalid as error:
        raise UsageError(f"the task of {sealed} cannot be loaded: {error}") from error


def _same_task(seal: dict[str, Any], task: Task) -> None:
    """An index into a set that has changed could name another task."""
    before = str(seal.get("evaluator", "")).partition("@")[0]
    if before and before != task.name:
        raise UsageError(
            f"{seal['episode']} was an episode of task {before!r}, but {seal['task']} is now {task.name!r}: "
            "put the task set back as it was"
        )


def _user() -> str:
    try:
        return getpass.getuser()
    except KeyError:  # a user id without a name
        return f"uid-{os.getuid()}"
