"""The work of ``bench elastic``: steps of seeded episodes with a long tail, as tasks for the paced harness.

What an episode does (turns, words of context, seconds of tool time) is drawn here and not left to the policy, so every
scheduling policy gets the same work, whatever its weights sample. Most tasks are alike; those of the tail take several
times as long, with longer tool times and more turns, and not for all their episodes equally. Every group has different
rewards, so every group is trained.

Pure but for ``write_tasks``. It knows neither stacks nor runs.
"""

from __future__ import annotations

import json
import math
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from infra.quickstart.tasks import WORDS
from workflows import names
from workflows.contracts.configuration import Contract

PLAN = "plan.json"
VERIFIER: Final = "#!/bin/sh\ncat /workspace/reward.txt > /logs/verifier/reward.txt\n"
SETTINGS: Final = 'schema_version = "1.3"\n[verifier]\ntimeout_sec = 60\n'


class StepShape(Contract):
    """A step's episodes."""

    groups: int = 12
    group_size: int = 4
    turns: int = 6
    """Of an ordinary episode."""
    words: int = 350
    """Of context that a turn brings; a word is 1.3 tokens."""
    max_tokens: int = 9
    """Sampled in a turn at most."""
    tool_s: float = 0.8
    """Seconds of tool time after each turn of an ordinary episode."""
    between: float = 0.1
    """Standard deviation of the logarithm of a task's level."""
    within: float = 0.1
    """The same among the episodes of a task."""
    tail_groups: int = 1
    tail: tuple[float, float] = (11.0, 11.0)
    """Shortest and longest of the tail's episodes, in ordinary ones; half of a tail group's episodes."""
    tail_turns: float = 1.0
    """How many times an ordinary episode's turns one of the tail makes; the rest of its length is tool time."""


@dataclass(frozen=True)
class PacedEpisode:
    turns: tuple[tuple[int, int, float], ...]
    """(words of context, sampled tokens at most, seconds of tool time)."""
    reward: float
    seed: int


StepWork = list[list[PacedEpisode]]


def draw_step(shape: StepShape, *, seed: int, step: int = 0) -> StepWork:
    """One step. The tasks and their levels are the seed's; episodes also depend on the step."""
    of_tasks = random.Random(f"tasks/{seed}")
    # Quantiles in a drawn order: each seed's step is as long as another's, and only the order differs.
    levels = [math.exp(shape.between * _normal((i + 0.5) / shape.groups)) for i in range(shape.groups)]
    of_tasks.shuffle(levels)
    tail = set(of_tasks.sample(range(shape.groups), shape.tail_groups))
    longest = [shape.tail[0] + (shape.tail[1] - shape.tail[0]) * i / max(1, len(tail) - 1) for i in range(len(tail))]
    draws = random.Random(f"episodes/{seed}/{step}")
    draws.shuffle(longest)
    drawn = []
    for task, level in enumerate(levels):
        scatter = [math.exp(shape.within * _normal((i + 0.5) / shape.group_size)) for i in range(shape.group_size)]
        draws.shuffle(scatter)
        lengths = [level * more for more in scatter]
        if task in tail:
            top = longest.pop()
            long = draws.sample(range(shape.group_size), max(1, shape.group_size // 2))
            for place, index in enumerate(long):
                lengths[index] = top * (1 - 0.25 * place / len(long))
        drawn.append([_episode(shape, length, index, draws) for index, length in enumerate(lengths)])
    return drawn


def warm_up(shape: StepShape) -> StepWork:
    """One group of short episodes: afterwards every cell is where a step leaves it."""
    draws = random.Random("warm-up")
    short = shape.model_copy(update={"tool_s": min(0.5, shape.tool_s)})
    return [[_episode(short, 0.34, index, draws) for index in range(shape.group_size)]]


def _episode(shape: StepShape, length: float, index: int, draws: random.Random) -> PacedEpisode:
    more = min(length, shape.tail_turns) if length > 2 else length
    turns = max(2, round(shape.turns * more))
    tool_s = shape.tool_s * shape.turns * length / turns
    drawn = [draws.uniform(0.7, 1.3) for _ in range(turns)]
    pauses = [tool_s * turns * share / sum(drawn) for share in drawn]
    # A longer episode's tool time makes up for what its turns don't: the length is that of the whole.
    made = tuple((round(shape.words * draws.uniform(0.85, 1.15)), shape.max_tokens, round(s, 3)) for s in pauses)
    reward = (index + 0.5) / shape.group_size
    return PacedEpisode(made, round(reward, 3), draws.getrandbits(48))


def _normal(quantile: float) -> float:
    """Of the standard normal distribution, by the logistic approximation (error below 0.02 between 1 % and 99 %)."""
    return math.log(quantile / (1 - quantile)) / 1.702


def session_of(run: str, step: int, group: int, index: int) -> str:
    """The session id that a harness of this episode is told (``infra.episodes.launch``)."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"gyre:{names.episode_name(run, step, group, index)}"))


def write_tasks(folder: Path, runs: Mapping[str, list[StepWork]]) -> None:
    """Write a set of tasks in which the episodes of each run's steps, by position, find what they are to do.

    Task g is that of group g of every step.
    """
    groups = max(len(step) for steps in runs.values() for step in steps)
    for group in range(groups):
        plan: dict[str, Any] = {"words": list(WORDS), "sessions": {}, "episodes": []}
        known: dict[PacedEpisode, int] = {}
        for run, steps in runs.items():
            for number, step in enumerate(steps):
                for index, episode in enumerate(step[group] if group < len(step) else ()):
                    place = known.setdefault(episode, len(known))
                    if place == len(plan["episodes"]):
                        plan["episodes"].append(
                            {"turns": episode.turns, "reward": episode.reward, "seed": episode.seed}
                        )
                    plan["sessions"][session_of(run, number, group, index)] = place
        task = folder / f"task-{group:03d}"
        for part in ("environment", "tests"):
            (task / part).mkdir(parents=True, exist_ok=True)
        (task / "task.toml").write_text(SETTINGS)
        (task / "instruction.md").write_text("Take as long as plan.json says.\n")
        (task / "environment" / PLAN).write_text(json.dumps(plan))
        verifier = task / "tests" / "test.sh"
        verifier.write_text(VERIFIER)
        verifier.chmod(0o755)
