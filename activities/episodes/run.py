"""`run_episode`: one execution of a harness, for hours, with heartbeats.

The harness runs under a supervisor that outlives this worker. While the activity runs, its task token lies in the
episode's folder, so that a worker that restarts here goes on with the same attempt (`activities.episodes.adoption`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.beating import beating
from activities.episodes.runner import EpisodeRunner
from activities.services import Services
from infra.files import write_whole
from infra.harness.harness import HarnessUnavailable
from infra.tasks.harbor import TaskInvalid
from workflows.contracts.configuration import Contract
from workflows.contracts.results import EpisodeExit, EpisodeInput

TOKEN_FILE = "activity.json"


class AdoptableAttempt(Contract):
    """What a worker needs to go on with an attempt that another process started."""

    token: str
    """Temporal's task token, hex."""
    episode: EpisodeInput


class EpisodeActivities:
    def __init__(self, services: Services) -> None:
        self._runner = EpisodeRunner(services)

    @activity.defn(name="run_episode")
    async def run_episode(self, episode: EpisodeInput) -> EpisodeExit:
        token = self._runner.folder(episode) / TOKEN_FILE
        await asyncio.to_thread(
            _write, token, AdoptableAttempt(token=activity.info().task_token.hex(), episode=episode)
        )
        try:
            async with beating(5.0):  # also while an older lease runs out, and while the workspace is packed and stored
                ended = await self._runner.run(episode)
        except asyncio.CancelledError:
            details = activity.cancellation_details()
            if details is not None and details.cancel_requested:
                await self._runner.cancel(episode)
                token.unlink(missing_ok=True)
            raise
        except (TaskInvalid, HarnessUnavailable) as error:
            token.unlink(missing_ok=True)
            raise ApplicationError(str(error), type=type(error).__name__, non_retryable=True) from error
        token.unlink(missing_ok=True)
        return ended


def _write(file: Path, attempt: AdoptableAttempt) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, attempt.model_dump_json())
