"""What a named workload predicts for the watermark policy, against what is published of it.

The published baselines are taken to be built as they usually are (batchwise, `workers.simulate.compare`), with the
split of the fit. Against baselines that overlap steps as gyre does there is another figure, and a bound on it that no
schedule exceeds: both are given, so that nobody takes the one for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from workers.simulate.compare import BASELINES, Comparison, batchwise, configured, priced
from workers.simulate.workloads import PUBLISHED, Workload, explanation
from workflows.simulation.simulator import Simulation
from workflows.simulation.workload import Steps


class Case(NamedTuple):
    comparison: Comparison
    work: Steps
    split: int
    """Training cells of the published Async; 0: the best."""


def predictions(named: Workload, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """A row for each staleness and baseline."""
    published = PUBLISHED[named.name]
    rows = []
    for case in cases:
        compared = case.comparison
        for over, figures in zip(BASELINES, (published.over_colocate, published.over_async), strict=True):
            usual = _usual_s(case, over)
            speedups = {name: usual / compared.runs[name].total_s for name in ("watermark", "predictive")}
            error = figures.error(speedups["watermark"])
            rows.append(
                {
                    "max_staleness": compared.max_staleness,
                    "over": over,
                    "predicted": speedups["watermark"],
                    "published": list(figures),
                    "error": error,
                    "predictive": speedups["predictive"],
                    "predictive_beats_published": speedups["predictive"] > figures.high,
                    "predictive_over_overlapped": compared.runs[over].total_s / compared.runs["predictive"].total_s,
                    "at_most_over_overlapped": compared.at_most(over),
                    "published_is_possible_over_overlapped": compared.at_most(over) >= figures.low,
                    "would_explain": explanation(over, error, compared.max_staleness),
                }
            )
    return rows


def _usual_s(case: Case, over: str) -> float:
    compared = case.comparison
    if over != "async" or not case.split:
        return compared.usual(over).total_s
    level = compared.max_staleness
    config = configured(priced(compared.pool), "async", case.split)
    return Simulation(compared.pool, case.work, config, level, pipeline=batchwise(level)).run().total_s


def sentences(row: dict[str, Any]) -> list[str]:
    """A row in words."""
    low, high = row["published"]
    published = f"{low:.2f}×" if low == high else f"{low:.2f}–{high:.2f}×"
    beats = "more than any published" if row["predictive_beats_published"] else "not more than every published"
    lines = [
        f"watermark over {row['over']}, max_staleness {row['max_staleness']}: predicted {row['predicted']:.2f}×, "
        f"published {published}, error {row['error']:+.1%}; predictive {row['predictive']:.2f}×, {beats}"
    ]
    if row["would_explain"]:
        lines.append(f"  would explain it: {row['would_explain']}")
    if row["max_staleness"]:
        most = row["at_most_over_overlapped"]
        lines.append(
            f"  over one that overlaps steps as gyre does: predictive {row['predictive_over_overlapped']:.2f}×, and at "
            f"most {most:.2f}× is possible: it is within {most - 1:.1%} of the lower bound"
            + ("" if row["published_is_possible_over_overlapped"] else "; what is published is more than that")
        )
    return lines
