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
from typing import Final, NamedTuple

from workers.simulate.compare import BASELINES, priced
from workflows.simulation.simulator import simulate
from workflows.simulation.workload import OVERLAPPED, DrawnWork, Pipeline, PoolModel, Steps

EPISODES: Final = 512
GROUP: Final = 16
TOKENS: Final = 700_000
"""Of an episode, about (published)."""
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


def build(
    hypothesis: Hypothesis, training: float, *, cells: int, steps: int, median_s: float = MEDIAN_S, seed: int = 0
) -> tuple[PoolModel, Steps, DrawnWork]:
    """A pool and its work, with ``training`` cell-seconds of training to a cell-second of rollout."""
    capacity = max(1, round(EPISODES / hypothesis.waves / cells))
    limit = median_s * hypothesis.limit
    drawn = DrawnWork(
        steps=steps,
        groups=EPISODES // GROUP,
        group_size=GROUP,
        median_s=median_s,
        spread=hypothesis.spread,
        correlation=hypothesis.correlation,
        tokens_per_s=1.0,
        tasks=4 * EPISODES // GROUP,
        seed=seed,
    )
    work = drawn.draw()
    done = sum(min(e.work_s, limit) for groups in work for g in groups for e in g.episodes)
    per_s = TOKENS * steps * EPISODES / done
    drawn = drawn.model_copy(update={"tokens_per_s": per_s})
    pool = PoolModel(
        cells=cells,
        capacity=capacity,
        train_tokens_per_s=per_s * capacity / training,
        switch_out_s=8.52,
        switch_in_s=3.46,
        publish_s=3.46,
        update_s=30.0,
        limit_s=limit,
        solo_speedup=hypothesis.solo_speedup,
        micro_step_tokens=TOKENS,
        poll_s=10.0,
    )
    return pool, drawn.draw(), drawn


@lru_cache(maxsize=4096)
def hours(
    hypothesis: Hypothesis,
    training: float,
    policy: str,
    *,
    cells: int,
    steps: int,
    of: int = 0,
    median_s: float = MEDIAN_S,
) -> float:
    """Of a run under a policy; the hypothesis says with which split.

    ``steps`` are simulated, and from the second one's end on the run is taken to go on like that to step ``of``: the
    first and the last steps have nothing to overlap with.
    """
    same = hypothesis
    if policy != "async":
        same = same._replace(split=0, streams=True)
    if policy == "colocate":
        same = same._replace(max_staleness=0)
    if same != hypothesis:
        return hours(same, training, policy, cells=cells, steps=steps, of=of, median_s=median_s)
    pool, work, _ = build(hypothesis, training, cells=cells, steps=steps, median_s=median_s)
    if policy == "async" and not hypothesis.split:
        splits = [hypothesis._replace(split=n) for n in range(1, cells)]
        return min(hours(s, training, policy, cells=cells, steps=steps, of=of, median_s=median_s) for s in splits)
    config = priced(pool).model_copy(update={"policy": policy, "training_cells": max(1, hypothesis.split)})
    streams = hypothesis.streams or policy != "async"
    pipeline = Pipeline(fills=False, streams=streams) if policy in BASELINES else OVERLAPPED
    run = simulate(pool, work, config, max_staleness=hypothesis.max_staleness, pipeline=pipeline)
    seconds = run.total_s
    if of > steps:
        known = min(2, steps - 1)
        begun = run.closed_s[known - 1] if known else 0.0
        seconds = begun + (run.total_s - begun) / (steps - known) * (of - known)
    return seconds / 3600


def fits(
    hypothesis: Hypothesis,
    *,
    cells: int,
    published: dict[str, float],
    steps: int,
    published_steps: int,
    around: float = 0.0,
) -> Iterator[Fit]:
    """Every amount of training under which the hypothesis reproduces the ratio of the two baselines.

    ``around``: look only near this one, to refine it on more steps.
    """
    of = published_steps
    target = published["async"] / published["colocate"]

    def ratio(training: float) -> float:
        found = {name: hours(hypothesis, training, name, cells=cells, steps=steps, of=of) for name in published}
        return found["async"] / found["colocate"]

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
            yield _scaled(hypothesis, training, cells=cells, published=published, runs=(steps, published_steps))


def _scaled(
    hypothesis: Hypothesis, training: float, *, cells: int, published: dict[str, float], runs: tuple[int, int]
) -> Fit:
    """Stretch time until both baselines take as long as published, in the mean of their ratios."""
    steps, of = runs
    found = {name: hours(hypothesis, training, name, cells=cells, steps=steps, of=of) for name in published}
    median_s = MEDIAN_S * sum(published[name] / found[name] for name in found) / len(found)
    result = {
        name: hours(hypothesis, training, name, cells=cells, steps=steps, of=of, median_s=median_s)
        for name in (*published, "watermark")
    }
    pool, _, _ = build(hypothesis, training, cells=cells, steps=steps, median_s=median_s)
    best = hours(hypothesis._replace(split=0), training, "async", cells=cells, steps=steps, of=of)
    return Fit(hypothesis, training, result, median_s, pool.train_tokens_per_s, found["async"] / best)


def central(found: Sequence[Fit], max_staleness: int) -> Fit:
    """The fit that a named workload takes: chosen by what is known of the baselines, never by what it predicts.

    Two waves (the published watermark counts queued episodes, so not all have a place at once), siblings half
    correlated, a budget close to the median (many requests end near the timeout); of those fits the one whose static
    split is closest to the best, because nobody runs a bad one.
    """
    middle = Hypothesis(0.5, 0.8, 1.2, 2, 2.0, max_staleness, 0)
    return min(
        (fit for fit in found if fit.hypothesis._replace(split=0, streams=True) == middle), key=lambda fit: fit.regret
    )
