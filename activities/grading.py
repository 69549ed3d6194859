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
from activities.episode_runner import task_at
from activities.services import Services
from infra.episodes.grading import EvaluatorFailed, grade
from infra.episodes.workspace import WorkspaceUnusable, unpack_workspace
from infra.sandbox.bubblewrap import Bubblewrap
from infra.tasks.harbor import TaskInvalid
from workflows.contracts import GradeInput, Verdict


class GradingActivities:
    def __init__(self, services: Services) -> None:
        self._blobs = services.blobs
        self._scratch = services.settings.root / "grading"
        self._sandbox = Bubblewrap()

    @activity.defn(name="grade_episode")
    async def grade_episode(self, episode: GradeInput) -> Verdict:
        self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
            folder = Path(scratch)
            try:
                task = await asyncio.to_thread(task_at, episode.task_set, episode.task)
                data = await asyncio.to_thread(self._blobs.get, episode.workspace_ref)
                await asyncio.to_thread(unpack_workspace, data, folder / "workspace")
                async with beating(10.0):
                    verdict = await grade(
                        task, folder / "workspace", folder / "logs", task.verifier.timeout_sec, self._sandbox
                    )
            except (EvaluatorFailed, TaskInvalid, WorkspaceUnusable) as error:
                kind = "TaskInvalid" if isinstance(error, TaskInvalid) else "EvaluatorFailed"
                raise ApplicationError(str(error), type=kind, non_retryable=True) from error
        return Verdict(reward=verdict.reward, seconds=verdict.seconds)
