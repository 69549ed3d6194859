"""One open step of a simulation: its episodes' clocks, its gradient ledger, what is left of it.

All episodes of a step that run go on at the same speed, so one clock of work and one of active time serve all of them:
an episode ends when the work clock has gone on by its work, or the active clock by its budget.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from workflows.contracts.results import MicroStepRef
from workflows.scheduling.gradient_ledger import GradientLedger
from workflows.simulation.workload import PoolModel, SimulatedGroup

NEVER = (math.inf, 0)


class StartedEpisode(NamedTuple):
    group: int
    work_at: float
    active_at: float
    tokens_per_s: float
    work_s: float


class EndedEpisode(NamedTuple):
    group: int
    active_s: float
    tokens: int


class SimulatedStep:
    def __init__(self, number: int, groups: Sequence[SimulatedGroup], pool: PoolModel) -> None:
        self.number, self.groups, self.pool = number, groups, pool
        self.total = self.unfinished = sum(len(group.episodes) for group in groups)
        self.left = [len(group.episodes) for group in groups]
        self.tokens_of = [0] * len(groups)
        self.first_start: dict[int, float] = {}
        self.started = [0] * len(groups)
        self.ended_logs: list[list[float]] = [[] for _ in groups]
        self.queue = deque(group for group, of in enumerate(groups) for _ in of.episodes)
        """Group of each episode that has not started, in the order in which they will."""
        self.running = 0
        self.starting: list[tuple[int, int]] = []
        """(group, number in it) of episodes that have a place and have not begun, oldest first."""
        self.work = self.active = 0.0
        self.share = self.speed = 0.0
        """Set by the simulation: share of time in which its episodes have a place, and work per second of each."""
        self.alive: dict[int, StartedEpisode] = {}
        self.by_work: list[tuple[float, int]] = []
        self.by_limit: list[tuple[float, int]] = []
        self.serial = 0
        self.ledger = GradientLedger()
        self.processed = 0
        self.open_tokens = 0
        self.trained_tokens, self.trained_s = 0, 0.0
        self.finishing = False
        self.updates = 0
        """Updates begun: one that loses a replica's sum is begun again."""

    # --- episodes -------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Episodes that have not started."""
        return len(self.queue)

    @property
    def placed(self) -> int:
        """Episodes that have a place."""
        return self.running + len(self.starting)

    def start(self) -> None:
        """Give the next episode a place; ``begin`` follows when it has started up."""
        group = self.queue.popleft()
        self.starting.append((group, self.started[group]))
        self.started[group] += 1

    def begin(self) -> None:
        """The episode that was given a place first asks its first question."""
        group, number = self.starting.pop(0)
        episode = self.groups[group].episodes[number]
        self.serial += 1
        self.first_start.setdefault(group, self.active)
        self.alive[self.serial] = StartedEpisode(group, self.work, self.active, episode.tokens_per_s, episode.work_s)
        heappush(self.by_work, (self.work + episode.work_s, self.serial))
        if self.pool.limit_s < math.inf:
            heappush(self.by_limit, (self.active + self.pool.limit_s, self.serial))
        self.running += 1

    def _first(self, heap: list[tuple[float, int]]) -> tuple[float, int]:
        while heap and heap[0][1] not in self.alive:
            heappop(heap)
        return heap[0] if heap else NEVER

    def next_end_s(self) -> float:
        """Seconds until the next of its episodes ends, at the present rates."""
        if not self.running or not self.share:
            return math.inf
        by_work = (self._first(self.by_work)[0] - self.work) / self.speed
        by_limit = (self._first(self.by_limit)[0] - self.active) / self.share
        return max(0.0, min(by_work, by_limit))

    def advance(self, seconds: float) -> None:
        self.work += self.speed * seconds
        self.active += self.share * seconds

    def stall(self, seconds: float) -> None:
        """Its episodes stand still for so long: what a moved one computes again. Budgets aren't charged with it."""
        if self.running:
            self.work -= seconds * self.speed
            self.active -= seconds * self.share

    def end(self) -> list[EndedEpisode]:
        """Take out the episodes that end now: the next one, and those that end with it."""
        ended: list[EndedEpisode] = []
        slack = 1e-9 * (1 + self.work + self.active)
        by_work, by_limit = self._first(self.by_work), self._first(self.by_limit)
        within = slack + max(0.0, min(by_work[0] - self.work, by_limit[0] - self.active))
        while self.running:
            by_work, by_limit = self._first(self.by_work), self._first(self.by_limit)
            if by_work[0] - self.work > within and by_limit[0] - self.active > within:
                break
            episode = self.alive.pop(by_work[1] if by_work[0] - self.work <= within else by_limit[1])
            self.running -= 1
            self.unfinished -= 1
            self.left[episode.group] -= 1
            done = min(episode.work_s, max(0.0, self.work - episode.work_at))
            tokens = round(done * episode.tokens_per_s)
            self.tokens_of[episode.group] += tokens
            active_s = self.active - episode.active_at
            self.ended_logs[episode.group].append(math.log(max(active_s, 1e-3)))
            ended.append(EndedEpisode(episode.group, active_s, tokens))
        return ended

    # --- training -------------------------------------------------------------------------------------------------

    def process(self, group: int) -> None:
        """All of a group's episodes are graded: its micro-steps wait."""
        self.processed += 1
        tokens = self.tokens_of[group]
        pieces = max(1, math.ceil(tokens / self.pool.micro_step_tokens)) if tokens else 0
        refs = []
        for piece in range(pieces):
            size = tokens * (piece + 1) // pieces - tokens * piece // pieces
            refs.append(MicroStepRef.model_construct(ref=f"{group}/{piece}", tokens=size, targets=size))
        self.ledger.add(refs)
        self.open_tokens += tokens

    def trained(self, tokens: int, seconds: float) -> None:
        self.open_tokens -= tokens
        self.trained_tokens += tokens
        self.trained_s += seconds

    def lose(self, incarnation: str) -> int:
        """A replica is lost, and with it its sum: its micro-steps wait again. Returns the tokens that were summed."""
        trainer = self.ledger.trainers.get(incarnation)
        if trainer is None:
            return 0
        summed = self.ledger.tokens(trainer.summed)
        self.open_tokens += summed
        self.ledger.lose(incarnation)
        if self.finishing:
            self.finishing = False
            self.updates += 1
        return summed

    @property
    def measured_tokens_per_s(self) -> float:
        return self.trained_tokens / self.trained_s if self.trained_s > 1 else 0.0

    @property
    def complete(self) -> bool:
        return self.processed == len(self.groups) and self.ledger.complete and self.ledger.core is not None
