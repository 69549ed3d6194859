"""Cancellation that cannot be missed."""

from __future__ import annotations

import asyncio

from temporalio import workflow


def heed_cancellation() -> None:
    """Raise CancelledError when the workflow has been asked to cancel.

    The SDK swallows a cancellation that arrives while a signal or a child's start is awaited.
    """
    if workflow.cancellation_reason() is not None:
        raise asyncio.CancelledError
