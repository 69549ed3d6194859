"""What is expected of a run's open steps: the history of its tasks in Redis, turned into outlooks for the policy.

A step that is closed is read once; of open ones, what has ended since. A worker that starts anew reads the last steps
again: nothing here needs to survive.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from redis.asyncio import Redis

from infra.state import durations
from infra.state.durations import StepClocks
from workflows.scheduling.forecasts import Durations, EpisodeClock
from workflows.scheduling.pool_view import Outlook, PoolView, StepView
from workflows.scheduling.predictive import admission_order

HISTORY_STEPS: Final = 32
"""Steps back that a worker reads when it hears of a run for the first time."""
FRESH_S: Final = 1.0
"""Seconds for which an outlook holds at least."""
NO_LIMIT_S: Final = 1e9


@dataclass
class RunHistory:
    """Durations of a run's training episodes, each observed once."""

    book: Durations = field(default_factory=lambda: Durations(limit_s=NO_LIMIT_S))
    seen: dict[int, set[str]] = field(default_factory=dict)
    """Episodes of each step that were observed."""
    next_step: int = 0
    """Every step before it is closed and read."""

    def observe(self, step: int, clocks: StepClocks) -> None:
        """Take in the episodes of a step that have ended since the last look."""
        if clocks.plan.limit_s:
            self.book.limit_s = clocks.plan.limit_s
        seen = self.seen.setdefault(step, set())
        for episode in sorted(clocks.active_s.keys() - seen):
            group = group_of(episode)
            if group < len(clocks.plan.tasks):
                self.book.observe(clocks.plan.tasks[group], clocks.active_s[episode], 0)
        seen |= clocks.active_s.keys()


@dataclass(frozen=True)
class Made:
    """An outlook, what it was made from, and until when it holds."""

    outlook: Outlook
    ended: int
    until: float


class Forecasts:
    """Of every run that this worker's activities speak of."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._histories: dict[str, RunHistory] = {}
        self._made: dict[tuple[str, int], Made] = {}

    async def start_order(self, run: str, step: int, tasks: list[str]) -> list[int]:
        """A step's groups in the order in which they should start: those whose tasks took longest before, first."""
        history = await self._caught_up(run, step)
        if not history.book.count:
            return list(range(len(tasks)))
        return admission_order([history.book.predict(task).seconds for task in tasks])

    async def with_outlooks(self, view: PoolView) -> PoolView:
        """The view with an outlook for each training step that is known; ``view`` has the present counts."""
        training = [step for step in view.steps if step.train]
        if not training or training[0].unfinished > (len(view.cells) - 1) * view.capacity:
            return view  # no cell can be spared: nothing depends on a forecast
        await self._caught_up(view.run, view.steps[0].step, closed=True)
        steps = [await self._with_outlook(view, step) if step.train else step for step in view.steps]
        return view.model_copy(update={"steps": steps})

    async def _with_outlook(self, view: PoolView, step: StepView) -> StepView:
        if not step.unfinished:
            return step
        key, ended, now = (view.run, step.step), step.total - step.unfinished, time.monotonic()
        made = self._made.get(key)
        if made is None or now >= made.until or (ended != made.ended and now >= made.until - made.outlook.tail_s / 50):
            outlook = await self._outlook(view, step)
            if outlook is None:
                return step
            made = Made(outlook, ended, now + FRESH_S + outlook.tail_s / 50)
            open_steps = {(view.run, other.step) for other in view.steps}
            self._made = {other: kept for other, kept in self._made.items() if other in open_steps}
            self._made[key] = made
        return step.model_copy(update={"outlook": made.outlook})

    async def _outlook(self, view: PoolView, step: StepView) -> Outlook | None:
        history = await self._caught_up(view.run, step.step)
        clocks = await durations.step_clocks(self._redis, view.run, step.step)
        if not clocks.plan.tasks:
            return None  # opened by a worker that planned nothing
        history.observe(step.step, clocks)
        history.book.training_tokens_per_s = view.rollout_tokens_per_s
        running = sorted(clocks.started.keys() - clocks.ended)
        held = dict(zip(running, await durations.held_s(self._redis, running), strict=True))
        groups = history.book.groups(
            clocks.plan.tasks, clocks.plan.group_size, episode_clocks(clocks, held, time.time())
        )
        return history.book.outlook(groups, view.capacity) if groups else None

    async def _caught_up(self, run: str, step: int, *, closed: bool = False) -> RunHistory:
        """The run's history with every step before ``step`` taken in; when they are ``closed``, for the last time."""
        if run not in self._histories:
            self._histories = {run: RunHistory(next_step=max(0, step - HISTORY_STEPS))}
        history = self._histories[run]
        for earlier in range(history.next_step, step):
            history.observe(earlier, await durations.step_clocks(self._redis, run, earlier))
            if closed:
                history.seen.pop(earlier, None)
        if closed:
            history.next_step = max(history.next_step, step)
        return history


def group_of(episode: str) -> int:
    """The number of its group, which an episode's name says."""
    return int(episode.rsplit("/", 2)[1])


def episode_clocks(clocks: StepClocks, held: dict[str, float], now: float) -> list[EpisodeClock]:
    """Of a step's episodes that have started. ``held``: seconds for which each that runs was held; ``now``: Unix
    seconds."""
    ended = [EpisodeClock(group_of(name), True, clocks.active_s.get(name)) for name in sorted(clocks.ended)]
    running = {name: at for name, at in clocks.started.items() if name not in clocks.ended}
    return ended + [
        EpisodeClock(group_of(name), False, max(0.0, now - at - held.get(name, 0.0))) for name, at in running.items()
    ]
