"""What a simulation is about: a pool of cells, and steps of groups of episodes whose durations are given or drawn.

Durations are *work*: the seconds that an episode takes on a full cell. Alone on a cell it is ``solo_speedup`` times
faster; between the two the time of its calls grows linearly with the calls that the cell answers, as decoding does.
Part of the time goes into tools, which no cell makes faster or slower: the slower the calls, the more of the others
wait for one too. Pure and seeded; it knows neither policies nor events.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final, NamedTuple

from pydantic import Field, model_validator

from workflows.contracts.configuration import Contract


class SimulatedEpisode(NamedTuple):
    work_s: float
    tokens_per_s: float
    """Training tokens that a second of its work brings."""


@dataclass(frozen=True)
class SimulatedGroup:
    task: str
    episodes: tuple[SimulatedEpisode, ...]


Steps = list[list[SimulatedGroup]]
"""Steps, in order, of groups, in order."""


class Absence(Contract):
    """A cell that is not there for a while, or for good, or that comes only later."""

    cell: int = Field(ge=0)
    at_s: float = Field(default=0.0, ge=0)
    """When it is gone, as seen by the scheduler."""
    for_s: float = Field(default=math.inf, gt=0)
    asked: bool = False
    """It was taken out of the pool: one that trains stays until its step is closed. Else it was lost, and with it the
    gradient sum that it held."""


class PoolModel(Contract):
    """Cells and what they cost. Seconds, unless a name says otherwise."""

    cells: int = Field(ge=1)
    capacity: int = Field(ge=1)
    """Episodes that one serving cell holds at once."""
    slots: int = Field(default=0, ge=0)
    """Episodes that run at once, whatever serves: more than serving cells hold slow each other down further, by the
    same law. 0: as many as serving cells hold."""
    train_tokens_per_s: float = Field(gt=0)
    """Training throughput of one cell."""
    switch_out_s: float = Field(default=0.0, ge=0)
    """Rollout to training: drain, release, load the replica, pull weights."""
    switch_in_s: float = Field(default=0.0, ge=0)
    """Training to rollout."""
    publish_s: float = Field(default=0.0, ge=0)
    """A serving (or training) cell takes over a new weight version."""
    open_s: float = Field(default=0.0, ge=0)
    """From the commit that lets a step open (or the run's start) until its first episodes start."""
    start_s: float = Field(default=0.0, ge=0)
    """Start-up of an episode: it has a place, and asks nothing of the cell. Not charged to its budget."""
    update_s: float = Field(default=0.0, ge=0)
    """Optimizer step, candidate and commit, when everything is trained."""
    gather_s: float = Field(default=0.0, ge=0)
    """Added to the update for each satellite: its gradient sum."""
    move_s: float = Field(default=0.0, ge=0)
    """What an episode loses when its cell leaves rollout: the recomputed prefix."""
    grade_s: float = Field(default=0.0, ge=0)
    """From the end of a group's last episode to its micro-steps: grading and processing."""
    claim_overhead_s: float = Field(default=0.0, ge=0)
    """What a claim of a training cell takes beyond its tokens."""
    limit_s: float = Field(default=math.inf, gt=0)
    """Active budget of an episode; what the proxy holds it for doesn't count."""
    solo_speedup: float = Field(default=1.0, ge=1)
    tool_share: float = Field(default=0.0, ge=0, le=1)
    """Of an episode's time on a full cell, what goes into tools: at most 1 / ``solo_speedup``."""
    micro_step_tokens: int = Field(default=1_000_000, ge=1)
    poll_s: float = Field(default=0.1, ge=0)
    """How often the policy looks."""
    absences: list[Absence] = []

    @model_validator(mode="after")
    def _check_tools(self) -> PoolModel:
        if self.tool_share * self.solo_speedup > 1 + 1e-6:
            raise ValueError(
                f"tools take {self.tool_share:.0%} of an episode on a full cell: alone it can be "
                f"{1 / self.tool_share:.2f} times as fast at most, not {self.solo_speedup:.2f}"
            )
        return self

    def speed(self, occupied: float) -> float:
        """Work per second of an episode when this share of its cell's places is taken: above 1 only with ``slots``."""
        occupied = occupied if self.slots else min(1.0, occupied)
        tools = min(self.tool_share, 1 / self.solo_speedup)
        if tools >= 1:
            return 1.0
        alone = 1 / self.solo_speedup - tools
        # Seconds of calls s for a second of work on a full cell: s = alone + slope × occupied × s / (tools + s).
        slope = (1 - 1 / self.solo_speedup) / (1 - tools)
        half = (alone + slope * occupied - tools) / 2
        return 1 / (tools + half + math.sqrt(half * half + alone * tools))

    @property
    def throughput(self) -> float:
        """Seconds of a full cell's work that a serving cell does in a second at most."""
        occupied = max(1.0, self.slots / self.capacity)
        return occupied * self.speed(occupied)


class Pipeline(NamedTuple):
    """What overlaps. gyre overlaps both; a baseline may not."""

    fills: bool = True
    """A later step's episodes start on places that this step's tail leaves free; else when its last one has ended."""
    streams: bool = True
    """Training starts with the first finished group; else when the whole step has been rolled out."""


OVERLAPPED: Final = Pipeline()


class DrawnWork(Contract):
    """Episodes drawn from a log-normal distribution: every task has a level, and its episodes scatter around it."""

    steps: int = Field(ge=1)
    groups: int = Field(ge=1)
    group_size: int = Field(ge=1)
    median_s: float = Field(gt=0)
    spread: float = Field(ge=0)
    """Standard deviation of the logarithm of an episode's work."""
    correlation: float = Field(ge=0, le=1)
    """Of siblings' logarithms: the share of the variance that lies between tasks."""
    tokens_per_s: float = Field(ge=0)
    """Training tokens that a second of an episode's work brings."""
    tasks: int = Field(ge=1)
    """Size of the training set: a pass over it takes tasks / groups steps."""
    seed: int = 0

    def draw(self) -> Steps:
        draws = random.Random(self.seed)
        between = self.spread * math.sqrt(self.correlation)
        within = self.spread * math.sqrt(1 - self.correlation)
        levels = [draws.gauss(0.0, between) for _ in range(self.tasks)]
        order: list[int] = []
        steps: Steps = []
        for _ in range(self.steps):
            groups = []
            for _ in range(self.groups):
                if not order:
                    order = list(range(self.tasks))
                    draws.shuffle(order)
                task = order.pop()
                works = [
                    self.median_s * math.exp(levels[task] + draws.gauss(0.0, within)) for _ in range(self.group_size)
                ]
                episodes = tuple(SimulatedEpisode(work, self.tokens_per_s) for work in works)
                groups.append(SimulatedGroup(f"task-{task}", episodes))
            steps.append(groups)
        return steps


class Bounds(NamedTuple):
    """No schedule is faster than the largest of these (seconds of the whole run)."""

    work_s: float
    """All rollout and training over all cells."""
    chain_s: float
    """The longest episode of each step, its group's training on all cells, the update; steps that may not overlap
    one after the other."""

    @property
    def bound_s(self) -> float:
        return max(self.work_s, self.chain_s)


def lower_bounds(pool: PoolModel, steps: Steps, max_staleness: int) -> Bounds:
    works, chains = [], []
    for groups in steps:
        rollout = tokens = 0.0
        longest = 0.0
        for group in groups:
            done = [min(episode.work_s, pool.limit_s * pool.solo_speedup) for episode in group.episodes]
            # At the latest the limit ends an episode, and then at the least with the work of a full cell.
            least = [min(episode.work_s, pool.limit_s) for episode in group.episodes]
            rollout += sum(least)
            # Less one each: tokens are whole.
            group_tokens = sum(
                max(0.0, work * episode.tokens_per_s - 1) for work, episode in zip(least, group.episodes, strict=True)
            )
            tokens += group_tokens
            last = pool.start_s + max(done) / pool.solo_speedup + pool.grade_s
            longest = max(longest, last + group_tokens / pool.train_tokens_per_s / pool.cells)
        works.append((rollout / pool.capacity / pool.throughput + tokens / pool.train_tokens_per_s) / pool.cells)
        chains.append(pool.open_s + longest + pool.update_s)
    if max_staleness == 0:
        together = [max(work, chain) for work, chain in zip(works, chains, strict=True)]
        return Bounds(work_s=sum(works), chain_s=sum(together))
    apart = max_staleness + 1
    return Bounds(work_s=sum(works), chain_s=max(sum(chains[first::apart]) for first in range(apart)))
