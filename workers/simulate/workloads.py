"""Named workloads: published experiments as far as they are published, each parameter with where it is from.

`published` is a figure of the publication, `fitted` comes out of a fit on the published times of the baselines alone
(`workers.simulate.fitting`), `assumed` is neither: a choice that the publication leaves open. The publication's figures
for the watermark policy are kept apart, in `PUBLISHED`: they are what a simulation is held against, and nothing is
fitted on them.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from workflows.configuration import Contract
from workflows.simulated_work import DrawnWork, PoolModel

Source = Literal["published", "fitted", "assumed"]

STEPS: Final = 48
PUBLISHED_HOURS: Final = {"async": 134.55, "colocate": 91.47, "watermark": 75.42}
"""NL2RepoBench on the 2.4T model, 48 steps."""


class Range(NamedTuple):
    low: float
    high: float

    def error(self, value: float) -> float:
        """Relative distance from the range; 0 within it."""
        if value < self.low:
            return value / self.low - 1
        return max(0.0, value / self.high - 1)


class Published(NamedTuple):
    """Speed-up of the watermark policy."""

    over_async: Range
    over_colocate: Range


class Workload(Contract):
    name: str
    about: str
    pool: PoolModel
    work: DrawnWork
    gpus_per_cell: int
    max_staleness: int
    """At which its figures are compared with the published ones."""
    split: int
    """Training cells of the published Async; 0: the best static split."""
    sources: dict[str, Source]
    """Parameter -> where it is from."""
    fit: str
    """What could be fitted, in words."""


WIDE: Final = Published(Range(1.38, 1.78), Range(1.21, 1.85))
"""All that is published for the experiments on the 122B model: ranges over all experiments."""
PUBLISHED: Final = {
    "nl2repobench-2.4t": Published(
        Range(*[PUBLISHED_HOURS["async"] / PUBLISHED_HOURS["watermark"]] * 2),
        Range(*[PUBLISHED_HOURS["colocate"] / PUBLISHED_HOURS["watermark"]] * 2),
    ),
    "nl2repobench-122b": WIDE,
    "deepswe-122b": WIDE,
    "terminalbench-122b": WIDE,
}

EXPLAINED: Final = {
    "async": "the split and the staleness of the published Async, which are not published: overlapping steps help a "
    "static split most, so a figure at another staleness than the published one is another comparison",
    "colocate": "the share of training in a step, how early groups finish (the correlation of siblings), how many "
    "episodes have no place at first, and what filler the published policy let cells do in the tail",
}
TRAINING: Final = 0.5438
"""Cell-seconds of training to one of rollout on full cells: fitted for the 2.4T model, taken over for the others."""


ASSUMED: Final = (
    "capacity",
    "publish_s",
    "update_s",
    "limit_s",
    "solo_speedup",
    "groups",
    "group_size",
    "spread",
    "correlation",
    "tokens_per_s",
    "tasks",
)


def _smaller(
    name: str,
    about: str,
    *,
    cells: int,
    median_s: float,
    spread: float,
    limit: float,
    correlation: float,
    tokens_per_s: float,
) -> Workload:
    """A workload on the 122B model, of which no time is published."""
    capacity = round(512 / 2 / cells)
    return Workload(
        name=name,
        about=about,
        pool=PoolModel(
            cells=cells,
            capacity=capacity,
            train_tokens_per_s=tokens_per_s * capacity / TRAINING,
            switch_out_s=8.52,
            switch_in_s=3.46,
            publish_s=3.46,
            update_s=30.0,
            limit_s=median_s * limit,
            solo_speedup=2.0,
            micro_step_tokens=700_000,
            poll_s=5.0,
        ),
        work=DrawnWork(
            steps=STEPS,
            groups=32,
            group_size=16,
            median_s=median_s,
            spread=spread,
            correlation=correlation,
            tokens_per_s=tokens_per_s,
            tasks=128,
        ),
        gpus_per_cell=32,
        max_staleness=0,
        split=0,
        sources={
            **dict.fromkeys(ASSUMED, "assumed"),
            "cells": "assumed",
            "median_s": "assumed",
            "train_tokens_per_s": "assumed",
            "switch_out_s": "assumed",
            "switch_in_s": "assumed",
            "steps": "assumed",
            "micro_step_tokens": "assumed",
        },
        fit="nothing can be fitted: no time of a baseline is published, only the range of the ratios that are to be "
        "predicted. The share of training is that of the 2.4T fit; nodes (24 to 32) are published, cells are not",
    )


WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload(
            name="nl2repobench-2.4t",
            about="NL2RepoBench on a 2.4T model, 4 cells of 48 nodes, 48 steps",
            pool=PoolModel(
                cells=4,
                capacity=64,
                train_tokens_per_s=47460.0,
                switch_out_s=8.52,
                switch_in_s=3.46,
                publish_s=3.46,
                update_s=30.0,
                limit_s=2418.6,
                solo_speedup=2.0,
                micro_step_tokens=700_000,
                poll_s=10.0,
            ),
            work=DrawnWork(
                steps=STEPS,
                groups=32,
                group_size=16,
                median_s=2015.5,
                spread=0.8,
                correlation=0.5,
                tokens_per_s=403.23,
                tasks=128,
            ),
            gpus_per_cell=384,
            max_staleness=0,
            split=1,
            sources={
                **dict.fromkeys(ASSUMED, "assumed"),
                "cells": "published",
                "steps": "published",
                "switch_out_s": "published",
                "switch_in_s": "published",
                "micro_step_tokens": "published",
                "median_s": "fitted",
                "train_tokens_per_s": "fitted",
            },
            fit="two times are published, so two parameters are fitted: seconds of an episode and training throughput. "
            "All else is assumed; an Async split of 1 of 4 comes closest to the best of those that reproduce the times",
        ),
        _smaller(
            "nl2repobench-122b",
            "NL2RepoBench on a 122B model, 8 cells of 4 nodes",
            cells=8,
            median_s=1200.0,
            spread=0.8,
            limit=1.2,
            correlation=0.5,
            tokens_per_s=650.0,
        ),
        _smaller(
            "deepswe-122b",
            "DeepSWE on a 122B model, 6 cells of 4 nodes",
            cells=6,
            median_s=900.0,
            spread=0.7,
            limit=2.5,
            correlation=0.5,
            tokens_per_s=150.0,
        ),
        _smaller(
            "terminalbench-122b",
            "TerminalBench on a 122B model, 6 cells of 4 nodes",
            cells=6,
            median_s=500.0,
            spread=1.0,
            limit=4.0,
            correlation=0.7,
            tokens_per_s=120.0,
        ),
    )
}
