"""What a simulated scheduler may know of durations: what production can learn, or everything.

`Learned` sees what production sees: active seconds of episodes that have ended. `Clairvoyant` knows every duration in
advance; with it the policy's own rules are kept, so the difference between the two is what forecasts cost.
"""

from __future__ import annotations

import math
from typing import Protocol

from workflows.scheduling.forecasts import Durations, GroupState, Prediction
from workflows.scheduling.pool_view import Outlook
from workflows.scheduling.predictive import admission_order
from workflows.simulation.step import SimulatedStep
from workflows.simulation.workload import PoolModel


class Foresight(Protocol):
    def observe(self, task: str, active_s: float, tokens: int) -> None: ...

    def starts(self, step: SimulatedStep) -> list[int]:
        """The group of each of the step's episodes, in the order in which they start."""
        ...

    def outlook(self, step: SimulatedStep) -> Outlook: ...


class Learned:
    def __init__(self, pool: PoolModel) -> None:
        self.pool = pool
        limit = pool.limit_s if pool.limit_s < math.inf else 1e9
        self.durations = Durations(limit_s=limit)

    def observe(self, task: str, active_s: float, tokens: int) -> None:
        self.durations.observe(task, active_s, tokens)

    def starts(self, step: SimulatedStep) -> list[int]:
        order = admission_order([self.durations.predict(group.task).seconds for group in step.groups])
        return [group for group in order for _ in step.groups[group].episodes]

    def predict(self, step: SimulatedStep, group: int) -> Prediction:
        ended = step.ended_logs[group]
        running = step.started[group] - len(ended)
        elapsed = step.active - step.first_start.get(group, step.active)
        return self.durations.predict_sibling(step.groups[group].task, ended, running, elapsed)

    def outlook(self, step: SimulatedStep) -> Outlook:
        places = max(1, step.placed)
        queued_before = 0
        groups = []
        for group, unfinished in enumerate(step.left):
            if not unfinished:
                continue
            predicted = self.predict(step, group)
            started = step.first_start.get(group)
            wait = 0.0
            if step.started[group] < len(step.groups[group].episodes):
                wait = queued_before / places * predicted.seconds
                queued_before += len(step.groups[group].episodes) - step.started[group]
            groups.append(
                GroupState(
                    predicted=predicted,
                    unfinished=unfinished,
                    elapsed_s=0.0 if started is None or wait else step.active - started,
                    wait_s=wait,
                    tokens_ready=step.tokens_of[group],
                )
            )
        return self.durations.outlook(groups, self.pool.capacity) if groups else Outlook(tail_s=0.0)


class Clairvoyant:
    """``whole_groups``: longest groups first, so that they end together; else longest episodes first."""

    def __init__(self, pool: PoolModel, *, whole_groups: bool = False) -> None:
        self.pool, self.whole_groups = pool, whole_groups

    def observe(self, task: str, active_s: float, tokens: int) -> None:
        return

    def starts(self, step: SimulatedStep) -> list[int]:
        if self.whole_groups:
            order = admission_order([sum(one.work_s for one in group.episodes) for group in step.groups])
            return [group for group in order for _ in step.groups[group].episodes]
        longest = [(-one.work_s, number) for number, group in enumerate(step.groups) for one in group.episodes]
        return [number for _, number in sorted(longest)]

    def outlook(self, step: SimulatedStep) -> Outlook:
        speed = step.speed or 1.0
        ends: dict[int, float] = {}
        work = 0.0
        tokens = {group: step.tokens_of[group] for group, left in enumerate(step.left) if left}
        for one in step.alive.values():
            left = max(
                0.0,
                min(one.work_at + one.work_s - step.work, (self.pool.limit_s - step.active + one.active_at) * speed),
            )
            work += left
            ends[one.group] = max(ends.get(one.group, 0.0), left / speed)
            tokens[one.group] += int(min(one.work_s, step.work - one.work_at + left) * one.tokens_per_s)
        places = max(1, step.placed)
        # Those that are starting up have a place; the others wait for one.
        coming = [(group, number, 0) for group, number in step.starting]
        queued = [
            (group, number)
            for group, of in enumerate(step.groups)
            for number in range(step.started[group], len(of.episodes))
        ]
        coming += [(*one, position) for position, one in enumerate(queued)]
        for group, number, position in coming:
            episode = step.groups[group].episodes[number]
            left = min(episode.work_s, self.pool.limit_s * speed)
            work += left
            ends[group] = max(ends.get(group, 0.0), left / speed * (1 + position / places))
            tokens[group] += int(left * episode.tokens_per_s)
        due = sorted((ends[group], tokens[group]) for group in ends)
        return Outlook(tail_s=max(ends.values(), default=0.0), rollout_s=work / self.pool.capacity, due=due)
