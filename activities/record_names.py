"""Names under which a run's records lie in the blob store."""

from __future__ import annotations


def config_name(run: str) -> str:
    return f"runs/{run}/config.json"


def latest_name(run: str) -> str:
    """The result of the step that made the newest committed version."""
    return f"runs/{run}/LATEST"


def step_name(run: str, step: int) -> str:
    return f"runs/{run}/steps/{step:06d}/result.json"


def seal_name(episode: str) -> str:
    """An episode's outcome, and the reference of its call records."""
    return f"episodes/{episode}.json"
