"""The pass-rate curve of a run as a PNG: held-out evaluations, and the training steps behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workflows.contracts.results import StepResult


def draw_curve(results: Sequence[StepResult], title: str, path: Path) -> None:
    """Write the curve to ``path``. The held-out line has the ±1 standard error of its tasks as a band."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    evaluations = [result for result in results if not result.train]
    training = [result for result in results if result.train]
    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    axes.plot(
        [result.version - 1 for result in training],
        [result.pass_rate for result in training],
        color="#9db4c0",
        linewidth=1,
        label="training episodes",
    )
    versions = [result.version for result in evaluations]
    rates = [result.pass_rate for result in evaluations]
    errors = [(rate * (1 - rate) / max(1, r.valid)) ** 0.5 for rate, r in zip(rates, evaluations, strict=True)]
    axes.errorbar(versions, rates, yerr=errors, color="#253237", marker="o", capsize=3, label="held-out tasks")
    axes.set(xlabel="weight version (updates)", ylabel="pass rate", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
