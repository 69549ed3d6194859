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
            order = admission_order([sum(episode.work_s for episode in group.episodes) for group in step.groups])
            return [group for group in order for _ in step.groups[group].episodes]
        longest = [(-episode.work_s, number) for number, group in enumerate(step.groups) for episode in group.episodes]
        return [number for _, number in sorted(longest)]

    def outlook(self, step: SimulatedStep) -> Outlook:
        limit, speed, places = self.pool.limit_s, step.speed or 1.0, max(1, step.placed)
        tokens = {group: step.tokens_of[group] for group, left in enumerate(step.left) if left}
        ends = dict.fromkeys(tokens, 0.0)
        work = 0.0
        for running in step.alive.values():
            of_work = running.work_at + running.work_s - step.work
            left = max(0.0, min(of_work, (limit - step.active + running.active_at) * speed))
            work += left
            ends[running.group] = max(ends[running.group], left / speed)
            done = step.work - running.work_at
            tokens[running.group] += int(min(running.work_s, done + left) * running.tokens_per_s)
        queued = [
            (group, number)
            for group, of in enumerate(step.groups)
            for number in range(step.started[group], len(of.episodes))
        ]
        # Those that are starting up have a place; the others wait for one.
        coming = [(at, 0) for at in step.starting] + [(at, position) for position, at in enumerate(queued)]
        for (group, number), position in coming:
            episode = step.groups[group].episodes[number]
            left = min(episode.work_s, limit * speed)
            work += left
            ends[group] = max(ends[group], left / speed * (1 + position / places))
            tokens[group] += int(left * episode.tokens_per_s)
        due = sorted((ends[group], tokens[group]) for group in ends)
        return Outlook(tail_s=max(ends.values(), default=0.0), rollout_s=work / self.pool.capacity, due=due)
