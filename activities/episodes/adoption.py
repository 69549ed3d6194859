"""A harness worker that restarts goes on with the attempts that were running on this host.

The supervisors have outlived the worker; so has each attempt's task token. With it the attempt is heartbeaten and
completed as if nothing had happened: no retry, no waiting for the heartbeat to run out.
"""

from __future__ import annotations

import asyncio
import logging

from pydantic import ValidationError
from temporalio.client import AsyncActivityCancelledError, AsyncActivityHandle
from temporalio.service import RPCError, RPCStatusCode

from activities.episodes.run import TOKEN_FILE, AdoptableAttempt
from activities.episodes.runner import EpisodeRunner
from activities.services import Services
from infra.settings import Settings

log = logging.getLogger(__name__)

BEAT_S = 5.0


def find_orphans(settings: Settings) -> list[AdoptableAttempt]:
    """Attempts whose token lies in an episode's folder. Call before this worker starts attempts of its own."""
    orphans = []
    for file in sorted(settings.episodes.glob(f"*/*/*/*/{TOKEN_FILE}")):
        try:
            orphans.append(AdoptableAttempt.model_validate_json(file.read_text(encoding="utf-8")))
        except ValidationError as error:
            log.warning("%s is no attempt: %s", file, error)
    return orphans


async def adopt(services: Services, orphans: list[AdoptableAttempt]) -> None:
    """Follow every orphan to its end."""
    await asyncio.gather(*(_adopt(services, orphan) for orphan in orphans))


async def _adopt(services: Services, attempt: AdoptableAttempt) -> None:
    runner = EpisodeRunner(services)
    handle = services.temporal.get_async_activity_handle(task_token=bytes.fromhex(attempt.token))
    token = runner.folder(attempt.episode) / TOKEN_FILE
    following = asyncio.create_task(runner.run(attempt.episode))
    try:
        if await _alive(handle, following):
            await handle.complete(await following)
        else:
            await runner.cancel(attempt.episode)
        token.unlink(missing_ok=True)
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        # Another attempt has taken over, or the workflow is gone: whoever it is adopts the supervisor.
        log.info("%s is no longer ours: %s", runner.name(attempt.episode), error)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _alive(handle: AsyncActivityHandle, following: asyncio.Task[object]) -> bool:
    """Heartbeat until the episode ends (True) or the attempt is cancelled (False)."""
    while True:
        try:
            await handle.heartbeat()
        except AsyncActivityCancelledError:
            return False
        done, _ = await asyncio.wait({following}, timeout=BEAT_S)
        if done:
            return True
