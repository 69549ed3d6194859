"""Fits a workload on the published times of its baselines, and on nothing else.

Two published times leave two parameters to be determined: how much training there is to a second of rollout, from
the *ratio* of the two times, and how long a second is, from their size. Everything else that shapes a run is an
assumption, a `Hypothesis`; a fit is made for each of many, those that cannot reproduce the baselines drop out, and
what the others predict for the watermark policy is the range that the published baselines leave open.

The baselines are batchwise: one step is rolled out after the other. A Colocate has no other way by its construction.
A static split that is on-policy can only overlap within a step, so it streams: it trains groups as they finish. One
that may be a step behind trains one batch while the next is rolled out, and may stream besides or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from workers.simulate.compare import BASELINES, configured, priced
from workers.simulate.workloads import COSTS, MICRO_STEP_TOKENS, STEP
from workflows.simulation.simulator import Simulation
from workflows.simulation.workload import OVERLAPPED, DrawnWork, Pipeline, PoolModel, Steps

EPISODES: Final = STEP["groups"] * STEP["group_size"]
MEDIAN_S: Final = 3600.0
"""Unit of time while the ratio is fitted; switches are negligible against it."""
NEAR: Final = 1.1
SHARES: Final = (0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 1.7, 3.0)


class Hypothesis(NamedTuple):
    """What the published baselines do not tell."""

    correlation: float
    """Of siblings' logarithms."""
    spread: float
    limit: float
    """Active budget, in medians of an episode."""
    waves: float
    """Episodes of a step over the places of all cells."""
    solo_speedup: float
    max_staleness: int
    split: int
    """Training cells of the published Async; 0: the best."""
    streams: bool = True
    """It trains groups as they finish."""


HYPOTHESES: Final = [
    Hypothesis(correlation, 0.8, limit, waves, 2.0, max_staleness, split, streams)
    for correlation, limit, waves, (max_staleness, streams), split in itertools.product(
        (0.0, 0.5, 0.9), (1.2, 2.0), (1, 2, 3), ((0, True), (1, True), (1, False)), (1, 2)
    )
]


class Extent(NamedTuple):
    """How much of a run is simulated for it."""

    cells: int
    steps: int
    """That are simulated."""
    of: int = 0
    """That the run has. From the second one's end on it is taken to go on as simulated: the first and the last steps
    have nothing to overlap with. 0: those that are simulated."""


class Fit(NamedTuple):
    hypothesis: Hypothesis
    training: float
    """Cell-seconds of training to one of rollout on full cells."""
    hours: dict[str, float]
    """Of the run: the fitted baselines', and the predicted watermark's."""
    median_s: float
    train_tokens_per_s: float
    regret: float
    """Time of the Async split that reproduces the baselines over that of the best one: nobody runs a bad split."""

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "hypothesis": self.hypothesis._asdict()}


def build(
    hypothesis: Hypothesis, training: float, extent: Extent, median_s: float = MEDIAN_S
) -> tuple[PoolModel, Steps]:
    """A pool and its work, with ``training`` cell-seconds of training to a cell-second of rollout."""
    capacity = max(1, round(EPISODES / hypothesis.waves / extent.cells))
    limit = median_s * hypothesis.limit
    drawn = DrawnWork(
        **{**STEP, "steps": extent.steps},
        median_s=median_s,
        spread=hypothesis.spread,
        correlation=hypothesis.correlation,
        tokens_per_s=1.0,
    )
    done = sum(min(e.work_s, limit) for groups in drawn.draw() for g in groups for e in g.episodes)
    per_s = MICRO_STEP_TOKENS * extent.steps * EPISODES / done
    pool = PoolModel(
        **{**COSTS, "solo_speedup": hypothesis.solo_speedup},
        cells=extent.cells,
        capacity=capacity,
        train_tokens_per_s=per_s * capacity / training,
        limit_s=limit,
        micro_step_tokens=MICRO_STEP_TOKENS,
        poll_s=10.0,
    )
    return pool, drawn.model_copy(update={"tokens_per_s": per_s}).draw()


@lru_cache(maxsize=4096)
def hours(hypothesis: Hypothesis, training: float, policy: str, extent: Extent, median_s: float = MEDIAN_S) -> float:
    """Of a run under a policy; the hypothesis says with which split."""
    same = hypothesis
    if policy != "async":
        same = same._replace(split=0, streams=True)
    if policy == "colocate":
        same = same._replace(max_staleness=0)
    if same != hypothesis:
        return hours(same, training, policy, extent, median_s)
    if policy == "async" and not hypothesis.split:
        splits = [hypothesis._replace(split=n) for n in range(1, extent.cells)]
        return min(hours(split, training, policy, extent, median_s) for split in splits)
    pool, work = build(hypothesis, training, extent, median_s)
    config = configured(priced(pool), policy, max(1, hypothesis.split))
    streams = hypothesis.streams or policy != "async"
    pipeline = Pipeline(fills=False, streams=streams) if policy in BASELINES else OVERLAPPED
    run = Simulation(pool, work, config, hypothesis.max_staleness, pipeline=pipeline).run()
    seconds, steps, of = run.total_s, extent.steps, extent.of
    if of > steps:
        known = min(2, steps - 1)
        begun = run.closed_s[known - 1] if known else 0.0
        seconds = begun + (run.total_s - begun) / (steps - known) * (of - known)
    return seconds / 3600


def fits(hypothesis: Hypothesis, published: dict[str, float], extent: Extent, *, around: float = 0.0) -> Iterator[Fit]:
    """Every amount of training under which the hypothesis reproduces the ratio of the two baselines' hours.

    ``around``: look only near this one, to refine it on more steps.
    """
    target = published["async"] / published["colocate"]

    def ratio(training: float) -> float:
        return hours(hypothesis, training, "async", extent) / hours(hypothesis, training, "colocate", extent)

    for low, high in [(around / NEAR, around * NEAR)] if around else itertools.pairwise(SHARES):
        if (ratio(low) - target) * (ratio(high) - target) > 0:
            continue
        below, above = low, high
        for _ in range(6 if around else 9):
            middle = (below * above) ** 0.5
            if (ratio(below) - target) * (ratio(middle) - target) <= 0:
                above = middle
            else:
                below = middle
        training = (below * above) ** 0.5
        if abs(ratio(training) / target - 1) < 0.02:  # a jump over the target reproduces nothing
            yield _scaled(hypothesis, training, published, extent)


def _scaled(hypothesis: Hypothesis, training: float, published: dict[str, float], extent: Extent) -> Fit:
    """Stretch time until both baselines take as long as published, in the mean of their ratios."""
    simulated = {name: hours(hypothesis, training, name, extent) for name in published}
    median_s = MEDIAN_S * sum(published[name] / simulated[name] for name in published) / len(published)
    of_run = {name: hours(hypothesis, training, name, extent, median_s) for name in (*published, "watermark")}
    pool, _ = build(hypothesis, training, extent, median_s)
    best = hours(hypothesis._replace(split=0), training, "async", extent)
    return Fit(hypothesis, training, of_run, median_s, pool.train_tokens_per_s, simulated["async"] / best)


def central(every: Sequence[Fit], max_staleness: int) -> Fit:
    """The fit that a named workload takes: chosen by what is known of the baselines, never by what it predicts.

    Two waves (the published watermark counts queued episodes, so not all have a place at once), siblings half
    correlated, a budget close to the median (many requests end near the timeout); of those fits the one whose static
    split is closest to the best, because nobody runs a bad one.
    """
    middle = Hypothesis(0.5, 0.8, 1.2, 2, 2.0, max_staleness, 0)
    alike = (fit for fit in every if fit.hypothesis._replace(split=0, streams=True) == middle)
    return min(alike, key=lambda fit: fit.regret)
