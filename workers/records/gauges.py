"""`gyre gauges`: what committed steps say of themselves, from their manifests in the blob store. Reads only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infra.state.blobs import BlobMissing, BlobStore
from infra.state.record_names import step_name, steps_name
from trajectory.gauges import MEANING, Gauges
from workers.errors import UsageError
from workflows.contracts.results import StepResult

COLUMNS: Final = {
    "token_p99": "tok p99",
    "sequence_p99": "seq p99",
    "outside_positive": "out +",
    "outside_negative": "out −",
    "malformed_positive": "malf +",
    "malformed_negative": "malf −",
    "trained": "trained",
    "excluded": "excl",
    "stale": "stale",
}
"""Of the table over a run's steps; `--json`, and a single step, have all."""

TASKS: Final = 10
"""Tasks that are shown of a step: those with the lowest mean reward."""


def of_run(blobs: BlobStore, run: str) -> list[StepResult]:
    """The results of a run's committed steps, in order. Raises UsageError when it has none."""
    names = blobs.names(steps_name(run))
    if not names:
        raise UsageError(f"run {run!r} has no committed step: `gyre status` lists the runs")
    return [StepResult.model_validate_json(blobs.get_named(name)) for name in names]


def of_step(blobs: BlobStore, run: str, step: int) -> tuple[StepResult, Gauges]:
    """Raises UsageError when the step isn't committed, or has no gauges."""
    with recorded(run, step):
        result = StepResult.model_validate_json(blobs.get_named(step_name(run, step)))
        if not result.gauges_ref:
            raise UsageError(f"step {step} of {run} recorded no gauges")
        return result, Gauges.model_validate_json(blobs.get(result.gauges_ref))


@contextmanager
def recorded(run: str, step: int) -> Iterator[None]:
    """What is read of a step inside has been recorded, or a UsageError says that it hasn't."""
    try:
        yield
    except BlobMissing as error:
        raise UsageError(f"nothing is recorded of run {run!r} step {step} ({error.args[0]} is missing)") from None


def print_run(results: list[StepResult], console: Console) -> None:
    table = Table("step", "", "reward", *COLUMNS.values(), box=None, padding=(0, 1, 0, 0))
    for result in results:
        numbers = (_number(result.gauges.get(name)) for name in COLUMNS)
        table.add_row(str(result.step), "train" if result.train else "eval", f"{result.mean_reward:.3f}", *numbers)
    console.print(table)


def print_step(result: StepResult, gauges: Gauges, console: Console) -> None:
    numbers = Table(box=None, show_header=False)
    for name, meaning in MEANING.items():
        if name in result.gauges:
            numbers.add_row(name, _number(result.gauges[name]), f"[dim]{escape(meaning)}[/]")
    kinds = Table("sampled tokens", "total", "trained", "left out", "no gradient", box=None)
    for kind, total in gauges.sampled.items():
        parts = (gauges.trained, gauges.left_out, gauges.without_gradient)
        kinds.add_row(kind, str(total), *(f"{part.get(kind, 0) / total:.1%}" for part in parts))
    lengths = Table("episodes of at least", "episodes", "excluded", box=None)
    for least, counts in sorted(gauges.lengths.items(), key=lambda item: int(item[0])):
        share = counts["excluded"] / counts["episodes"]
        lengths.add_row(f"{least} sampled tokens", str(counts["episodes"]), f"{counts['excluded']} ({share:.1%})")
    signs = Table("advantage", "calls", "with malformed tool calls", "malformed tool calls", box=None)
    for sign, counts in gauges.malformed.items():
        signs.add_row(sign, *(str(counts[name]) for name in ("calls", "malformed_calls", "malformed_spans")))
    tasks = Table("task (lowest mean reward first)", "episodes", "reward", box=None)
    rewards = gauges.rewards.items()
    graded = [(sums["reward"] / sums["episodes"], sums["episodes"], task) for task, sums in rewards if sums["episodes"]]
    for reward, episodes, task in sorted(graded)[:TASKS]:
        tasks.add_row(escape(task), f"{episodes:g}", f"{reward:.3f}")
    for table in (numbers, kinds, lengths, signs):
        console.print(table)
    without = f"groups without gradient: {_counts(gauges.groups_without_gradient)} of {gauges.groups}"
    console.print(f"excluded: {_counts(gauges.excluded)}; {without}")
    console.print(f"trained tokens by staleness: {_counts(gauges.trained_by_lag)}; duplicates: {gauges.duplicates}")
    console.print(tasks)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}" if abs(value) < 1e-3 else f"{value:.3f}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
