"""What workflows tell each other, and a cancellation that cannot be missed."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel
from temporalio import workflow
from temporalio.exceptions import ApplicationError


async def tell(workflow_id: str, signal: str, message: BaseModel | str | bool) -> bool:
    """Signal a workflow that may be over. False, with a line in the log, when it is."""
    try:
        await workflow.get_external_workflow_handle(workflow_id).signal(signal, message)
    except ApplicationError as error:
        workflow.logger.warning("%s does not hear %s: %s", workflow_id, signal, error)
        return False
    return True


def heed_cancellation() -> None:
    """Raise CancelledError when the workflow has been asked to cancel.

    The SDK swallows a cancellation that arrives while a signal or a child's start is awaited.
    """
    if workflow.cancellation_reason() is not None:
        raise asyncio.CancelledError
