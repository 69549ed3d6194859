"""Names under which a run's records lie in the blob store."""

from __future__ import annotations


def config_name(run: str) -> str:
    return f"runs/{run}/config.json"


def latest_name(run: str) -> str:
    """The result of the step that made the newest committed version."""
    return f"runs/{run}/LATEST"


def steps_name(run: str) -> str:
    """The folder of the results of a run's steps."""
    return f"runs/{run}/steps"


def step_name(run: str, step: int) -> str:
    return f"{steps_name(run)}/{step:06d}/result.json"


def verdict_name(episode: str, verdict: str) -> str:
    """A verdict that was given after the episode was sealed; an episode may have any number, each under its own id."""
    return f"verdicts/{episode}/{verdict}.json"


def seal_name(episode: str) -> str:
    """An episode's outcome, and the reference of its call records."""
    return f"episodes/{episode}.json"
