"""`grade_episode`: the task's verifier on the preserved workspace, in a second sandbox, after the harness is gone.

A verifier that fails is `EvaluatorFailed`: the workflow excludes the episode. It is never a zero.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.beating import beating
from activities.episodes.runner import task_at
from activities.services import Services
from infra.episodes.grading import EvaluatorFailed, Graded, evaluator_of, grade
from infra.episodes.workspace import WorkspaceUnusable, unpack_workspace
from infra.sandbox.bubblewrap import Bubblewrap
from infra.sandbox.spec import Sandbox
from infra.tasks.harbor import Task, TaskInvalid
from workflows.contracts.results import GradeInput, Verdict


class GradingActivities:
    def __init__(self, services: Services) -> None:
        self._blobs = services.blobs
        self._scratch = services.settings.root / "grading"
        self._sandbox = Bubblewrap()

    @activity.defn(name="grade_episode")
    async def grade_episode(self, episode: GradeInput) -> Verdict:
        try:
            task = await asyncio.to_thread(task_at, episode.task_set, episode.task)
        except TaskInvalid as error:
            raise ApplicationError(str(error), type="TaskInvalid", non_retryable=True) from error
        evaluator = await asyncio.to_thread(evaluator_of, task)
        try:
            async with beating(10.0):
                workspace = await asyncio.to_thread(self._blobs.get, episode.workspace_ref)
                verdict = await grade_preserved(task, workspace, self._scratch, self._sandbox)
        except (EvaluatorFailed, WorkspaceUnusable) as error:
            raise ApplicationError(str(error), evaluator, type="EvaluatorFailed", non_retryable=True) from error
        return Verdict(reward=verdict.reward, seconds=verdict.seconds, evaluator=evaluator)


async def grade_preserved(task: Task, workspace: bytes, scratch: Path, sandbox: Sandbox) -> Graded:
    """The verifier's verdict on a preserved workspace, unpacked below ``scratch`` for the time being.

    Raises EvaluatorFailed, and WorkspaceUnusable when the bytes are no workspace.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        await asyncio.to_thread(unpack_workspace, workspace, folder / "workspace")
        return await grade(task, folder / "workspace", folder / "logs", task.verifier.timeout_sec, sandbox)
