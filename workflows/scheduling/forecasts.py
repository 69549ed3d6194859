"""How long episodes will take: predicted from their siblings that have ended, and from their task's history.

Logarithms of durations are normal: an episode's is its task's level plus its own deviation. A task's level is drawn
towards the level of all tasks by as much as its own observations leave open (normal-normal shrinkage). An episode
that still runs is known to take longer than it has run. Pure; it knows neither clock nor cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean
from typing import Final, NamedTuple

from workflows.scheduling.pool_view import Outlook

NORMAL: Final = NormalDist()
PRIOR_SPREAD: Final = 0.7
"""Standard deviation of log durations, of tasks and of siblings each, that is assumed until episodes have ended."""
PRIOR_WEIGHT: Final = 8.0
"""Episodes' worth of observations that the prior spread stands for."""
DUE_KEPT: Final = 8
"""Groups of an outlook at most: later ones are merged."""


@dataclass
class TaskRecord:
    count: int = 0
    total: float = 0.0
    squares: float = 0.0


class Prediction(NamedTuple):
    level: float
    """Mean of the logarithm of an episode's seconds."""
    spread: float
    """Its standard deviation."""

    @property
    def seconds(self) -> float:
        """The median."""
        return math.exp(self.level)


class EpisodeClock(NamedTuple):
    """Of an episode that has started."""

    group: int
    ended: bool
    active_s: float | None
    """Active seconds that it took, or has run so far; None when it ended without having run."""


class GroupState(NamedTuple):
    predicted: Prediction
    """Of its unfinished episodes."""
    unfinished: int
    elapsed_s: float
    """Active seconds that its unfinished episodes have run, about."""
    wait_s: float = 0.0
    """Seconds until they start, if they have not."""
    tokens_ready: int = 0
    """Training tokens of its episodes that have ended."""


@dataclass
class Durations:
    """What has been seen of durations. ``limit_s``: the active budget, which no episode passes."""

    limit_s: float
    tasks: dict[str, TaskRecord] = field(default_factory=dict)
    count: int = 0
    total: float = 0.0
    within: float = 0.0
    """Sum of squared deviations of siblings from their task's mean."""
    within_degrees: int = 0
    tokens: int = 0
    seconds: float = 0.0
    training_tokens_per_s: float = 0.0
    """What an active second of an episode brings, where that was measured as a whole."""

    def observe(self, task: str, seconds: float, tokens: int) -> None:
        """An episode has ended after so many active seconds, and brings so many training tokens."""
        log = self.log_of(seconds)
        record = self.tasks.setdefault(task, TaskRecord())
        if record.count:
            mean = record.total / record.count
            self.within += (log - mean) ** 2 * record.count / (record.count + 1)
            self.within_degrees += 1
        record.count += 1
        record.total += log
        self.count += 1
        self.total += log
        self.tokens += tokens
        self.seconds += seconds

    @staticmethod
    def log_of(seconds: float) -> float:
        return math.log(max(seconds, 1e-3))

    @property
    def tokens_per_s(self) -> float:
        """Training tokens that an active second of an episode brings."""
        if self.training_tokens_per_s:
            return self.training_tokens_per_s
        return self.tokens / self.seconds if self.seconds else 0.0

    def predict(self, task: str) -> Prediction:
        """The next episode of a task."""
        level = self.total / self.count if self.count else math.log(self.limit_s / 4)
        within = (self.within + PRIOR_WEIGHT * PRIOR_SPREAD**2) / (self.within_degrees + PRIOR_WEIGHT)
        between = self._between(level, within)
        record = self.tasks.get(task)
        if record is None or not record.count:
            return Prediction(level, math.sqrt(within + between))
        trust = between / (between + within / record.count)
        mean = level + trust * (record.total / record.count - level)
        return Prediction(mean, math.sqrt(within + between * (1 - trust)))

    def predict_sibling(self, task: str, ended_logs: Sequence[float], running: int, elapsed_s: float) -> Prediction:
        """An episode whose siblings in this step have ended after these (logarithms of) seconds, or still run.

        What runs already longer than was expected moves the expectation, by the time that it must have.
        """
        prior = self.predict(task)
        within = (self.within + PRIOR_WEIGHT * PRIOR_SPREAD**2) / (self.within_degrees + PRIOR_WEIGHT)
        between = max(1e-6, prior.spread**2 - within)
        total, seen = sum(ended_logs), float(len(ended_logs))
        if running and elapsed_s > 0:
            point = NORMAL.cdf((math.log(elapsed_s) - prior.level) / prior.spread)
            # The running ones say as much as the probability that they could have ended by now.
            middle = prior.level + prior.spread * NORMAL.inv_cdf(min(1 - 1e-6, (1 + point) / 2))
            total, seen = total + middle * running * point, seen + running * point
        if not seen:
            return prior
        trust = between / (between + within / seen)
        level = prior.level + trust * (total / seen - prior.level)
        return Prediction(level, math.sqrt(within + between * (1 - trust)))

    def _between(self, level: float, within: float) -> float:
        """Variance of tasks' levels, kept until another task or a tenth more episodes have been seen."""
        seen = (len(self.tasks), int(10 * math.log(self.count + 1)))
        if self._cached is None or self._cached[0] != seen:
            records = [record for record in self.tasks.values() if record.count]
            squares = PRIOR_WEIGHT * PRIOR_SPREAD**2
            for record in records:
                squares += max(0.0, (record.total / record.count - level) ** 2 - within / record.count)
            self._cached = (seen, squares / (len(records) + PRIOR_WEIGHT))
        return self._cached[1]

    _cached: tuple[tuple[int, int], float] | None = None

    def groups(self, tasks: Sequence[str], group_size: int, clocks: Iterable[EpisodeClock]) -> list[GroupState]:
        """A step's unfinished groups; of those that have not started, the lower number starts first."""
        ended: list[list[float | None]] = [[] for _ in tasks]
        running: list[list[float]] = [[] for _ in tasks]
        for clock in clocks:
            if clock.ended:
                ended[clock.group].append(clock.active_s)
            elif clock.active_s is not None:
                running[clock.group].append(clock.active_s)
        places = max(1, sum(map(len, running)))
        queued_before = 0
        states = []
        for group, task in enumerate(tasks):
            unfinished = group_size - len(ended[group])
            if unfinished <= 0:
                continue
            took = [seconds for seconds in ended[group] if seconds is not None]
            elapsed = fmean(running[group]) if running[group] else 0.0
            predicted = self.predict_sibling(task, list(map(self.log_of, took)), len(running[group]), elapsed)
            queued = unfinished - len(running[group])
            wait = queued_before / places * predicted.seconds if queued > 0 else 0.0
            queued_before += max(0, queued)
            states.append(
                GroupState(
                    predicted=predicted,
                    unfinished=unfinished,
                    elapsed_s=0.0 if wait else elapsed,
                    wait_s=wait,
                    tokens_ready=round(sum(took) * self.tokens_per_s),
                )
            )
        return states

    def outlook(self, groups: Sequence[GroupState], capacity: int) -> Outlook:
        """Of a step's unfinished groups."""
        unfinished = sum(group.unfinished for group in groups)
        work = 0.0
        due: list[tuple[float, int, float]] = []
        tail = 0.0
        for group in groups:
            predicted = group.predicted
            middle = self.remaining(predicted, group.elapsed_s, 0.5)
            work += group.unfinished * middle
            last = group.wait_s + self.remaining(predicted, group.elapsed_s, 0.5 ** (1 / group.unfinished))
            longest = group.wait_s + self.remaining(predicted, group.elapsed_s, 0.5 ** (1 / unfinished))
            tail = max(tail, (last + longest) / 2)
            tokens = group.tokens_ready + group.unfinished * (group.elapsed_s + middle) * self.tokens_per_s
            due.append((last, int(tokens), group.wait_s + self.limit_s - group.elapsed_s))
        due.sort()
        while len(due) > DUE_KEPT:
            pairs = [due[i : i + 2] for i in range(0, len(due), 2)]
            due = [
                (pair[-1][0], sum(tokens for _, tokens, _ in pair), max(latest for *_, latest in pair))
                for pair in pairs
            ]
        return Outlook(
            tail_s=tail,
            rollout_s=work / capacity,
            due=[(seconds, tokens) for seconds, tokens, _ in due],
            latest_s=[max(seconds, latest) for seconds, _, latest in due],
        )

    def remaining(self, predicted: Prediction, elapsed_s: float, share: float) -> float:
        """Seconds after which an episode that has run ``elapsed_s`` has ended with probability ``share``."""
        left = max(0.0, self.limit_s - elapsed_s)
        ended = NORMAL.cdf((math.log(elapsed_s) - predicted.level) / predicted.spread) if elapsed_s > 0 else 0.0
        point = ended + share * (1 - ended)
        if point >= 1 - 1e-9:
            return left
        total = math.exp(predicted.level + predicted.spread * NORMAL.inv_cdf(max(point, 1e-9)))
        return min(left, max(0.0, total - elapsed_s))
