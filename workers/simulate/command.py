"""`gyre simulate`: its options, and what it prints. The work is done by the modules beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.errors import UsageError
from workers.printing import Json, console, show

if TYPE_CHECKING:
    from workers.simulate.compare import Comparison
    from workers.simulate.workloads import Workload
    from workflows.simulated_work import Steps


async def simulate(
    workload: Annotated[str, typer.Argument(help="Name of a workload; `list` names them.")] = "",
    *,
    trace: Annotated[Path | None, typer.Option(help="Episodes of a run, by `gyre episodes RUN --export FILE`.")] = None,
    staleness: Annotated[list[int] | None, typer.Option(min=0, max=2, help="max_staleness, repeatable.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to simulate.")] = None,
    cells: Annotated[int | None, typer.Option(min=1, help="Cells of the pool.")] = None,
    capacity: Annotated[int | None, typer.Option(min=1, help="Episodes that a serving cell holds at once.")] = None,
    training: Annotated[float | None, typer.Option(help="Tokens per second that one cell trains.")] = None,
    switch_out: Annotated[float | None, typer.Option(min=0, help="Seconds from rollout to training.")] = None,
    switch_in: Annotated[float | None, typer.Option(min=0, help="Seconds from training to rollout.")] = None,
    publish: Annotated[float | None, typer.Option(min=0, help="Seconds in which a cell takes new weights.")] = None,
    update: Annotated[float | None, typer.Option(min=0, help="Seconds of the optimizer step and its commit.")] = None,
    solo: Annotated[
        float | None, typer.Option(min=1, help="Speed of an episode alone on a cell over a full one.")
    ] = None,
    limit: Annotated[float | None, typer.Option(help="Active budget of an episode, seconds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of a named workload's episodes.")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Fit again on the published baselines (minutes).")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw what each cell does.")] = None,
    as_json: Json = False,
) -> None:
    """Compare the scheduling policies on a workload: time per step, speed-up, utilisation, idle GPU-hours, switches."""
    given = {
        "cells": cells,
        "capacity": capacity,
        "train_tokens_per_s": training,
        "switch_out_s": switch_out,
        "switch_in_s": switch_in,
        "publish_s": publish,
        "update_s": update,
        "solo_speedup": solo,
        "limit_s": limit,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if bool(workload) == (trace is not None):
        raise UsageError("name a workload or give --trace FILE: `gyre simulate list` names the workloads")
    if workload == "list":
        _list(as_json)
    elif fit:
        await asyncio.to_thread(_fit, workload, as_json)
    else:
        await asyncio.to_thread(
            _simulate, workload, trace, changes, staleness=staleness, steps=steps, seed=seed, png=png, as_json=as_json
        )


def _named(name: str) -> Workload:
    from workers.simulate.workloads import WORKLOADS

    if name not in WORKLOADS:
        raise UsageError(f"there is no workload {name!r}: there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def _simulate(
    workload: str,
    trace: Path | None,
    changes: dict[str, Any],
    *,
    staleness: list[int] | None,
    steps: int | None,
    seed: int | None,
    png: Path | None,
    as_json: bool,
) -> None:
    from workers.simulate.compare import compare
    from workers.simulate.timeline import draw_timeline
    from workers.simulate.trace import pool_for, read_trace, steps_of
    from workflows.simulated_work import PoolModel

    if trace is not None:
        episodes = read_trace(trace)
        pool = pool_for(episodes, changes)
        work, title, gpus, named = steps_of(episodes, pool), str(trace), 0, None
        levels = staleness or [0]
    else:
        named = _named(workload)
        drawn = named.work.model_copy(update={"seed": seed} if seed is not None else {})
        pool = PoolModel.model_validate({**named.pool.model_dump(), **changes})
        work, title, gpus = drawn.draw(), workload, named.gpus_per_cell
        levels = staleness or [0, 1]
    work = work[: steps or len(work)]
    compared = [
        compare(pool, work, max_staleness=level, gpus_per_cell=gpus, timeline=png is not None) for level in levels
    ]
    predicted = None
    if named is not None and not changes and steps is None:
        predicted = predictions(named, compared, work)
    if png is not None:
        draw_timeline(compared[-1].runs, png, steps=3, title=f"{title}, max_staleness {levels[-1]}")
    if as_json:
        found: dict[str, Any] = {
            "workload": title,
            "pool": pool.model_dump(),
            "compared": [c.as_json() for c in compared],
        }
        if named is not None:
            found |= {"about": named.about, "sources": named.sources, "fit": named.fit, "prediction": predicted}
        show(found)
        return
    if named is not None:
        _print_parameters(named)
    for comparison in compared:
        _print(comparison.as_json())
    if predicted is not None:
        _print_predictions(predicted)
    if png is not None:
        console.print(f"timeline: {png}")


def predictions(named: Workload, compared: Iterable[Comparison], work: Steps) -> list[dict[str, Any]]:
    """Speed-ups of `watermark` as simulated, as published, and the error, at each staleness that was simulated."""
    from workers.simulate.workloads import EXPLAINED, PUBLISHED

    published = PUBLISHED[named.name]
    compared = list(compared)
    fitted = next((one for one in compared if one.max_staleness == named.max_staleness), compared[0])
    rows = []
    for comparison in compared:
        for over, figures in (("async", published.over_async), ("colocate", published.over_colocate)):
            runs = comparison.runs
            baseline, reference = runs[over].total_s, fitted.runs[over].total_s
            if over == "async" and named.split:
                baseline = comparison.static_split(work, named.split).total_s
                reference = fitted.static_split(work, named.split).total_s
            error = figures.error(baseline / runs["watermark"].total_s)
            rows.append(
                {
                    "max_staleness": comparison.max_staleness,
                    "fitted_at_this_staleness": comparison is fitted,
                    "over": over,
                    "predicted": baseline / runs["watermark"].total_s,
                    "published": list(figures),
                    "error": error,
                    "predictive": baseline / runs["predictive"].total_s,
                    "predictive_over_fitted_baseline": reference / runs["predictive"].total_s,
                    "would_explain": EXPLAINED[over] if abs(error) > 0.1 else "",
                }
            )
    return rows


def _fit(workload: str, as_json: bool) -> None:
    from workers.simulate.fitting import HYPOTHESES, central, fits
    from workers.simulate.workloads import PUBLISHED_HOURS, STEPS

    named = _named(workload)
    if named.name != "nl2repobench-2.4t":
        raise UsageError(f"{workload} can't be fitted: {named.fit}")
    baselines = {name: PUBLISHED_HOURS[name] for name in ("async", "colocate")}
    found = []
    for hypothesis in HYPOTHESES:
        for one in fits(hypothesis, cells=named.pool.cells, published=baselines, steps=4, published_steps=STEPS):
            found.append(one)
            if not as_json:
                console.print(f"{one.hypothesis} training {one.training:.3f} {one.hours}", highlight=False)
    middle = central(found)
    hours = sorted(one.hours["watermark"] for one in found)
    if as_json:
        rows = [{**one.hypothesis._asdict(), "training": one.training, "hours": one.hours} for one in found]
        show({"hypotheses": len(HYPOTHESES), "fits": rows, "central": rows[found.index(middle)]})
        return
    console.print(
        f"{len(found)} fits of {len(HYPOTHESES)} hypotheses reproduce the baselines; they predict {hours[0]:.1f} to "
        f"{hours[-1]:.1f} h for watermark, {middle.hours['watermark']:.1f} h in the middle "
        f"(published: {PUBLISHED_HOURS['watermark']} h)",
        highlight=False,
    )


def _list(as_json: bool) -> None:
    from workers.simulate.workloads import WORKLOADS

    if as_json:
        show({name: workload.model_dump() for name, workload in WORKLOADS.items()})
        return
    for name, workload in WORKLOADS.items():
        console.print(f"{name}: {workload.about}", highlight=False)


def _print_parameters(named: Workload) -> None:
    console.print(f"[bold]{named.name}[/]: {named.about}", highlight=False)
    values = {**named.pool.model_dump(), **named.work.model_dump()}
    for source in ("published", "fitted", "assumed"):
        of = [f"{name} {values[name]:g}" for name, where in named.sources.items() if where == source and name in values]
        console.print(f"  {source}: {', '.join(of) or 'nothing'}", highlight=False)
    console.print(f"  fit: {named.fit}", highlight=False)


COLUMNS = "{:<22}{:>10}{:>10}{:>13}{:>13}{:>16}{:>15}{:>16}"


def _print(found: dict[str, Any]) -> None:
    console.print(f"max_staleness {found['max_staleness']}, {found['steps']} steps, {found['cells']} cells")
    rows = {**found["policies"], "clairvoyant": found["clairvoyant"]}
    idle = "idle_gpu_hours" if "idle_gpu_hours" in found["clairvoyant"] else "idle_cell_hours"
    names = ("policy", "s / step", "vs async", "vs colocate", "utilisation", idle.replace("_", " "))
    lines = [COLUMNS.format(*names, "switches/step", "of clairvoyant")]
    for name, row in rows.items():
        speedups = [f"{row['speedup'][over]:.2f}×" if over in row["speedup"] else "" for over in ("async", "colocate")]
        lines.append(
            COLUMNS.format(
                f"{name} ({row['training_cells']} train)" if "training_cells" in row else name,
                f"{row['step_s']:.1f}",
                *speedups,
                f"{row['utilisation']:.1%}",
                f"{row[idle]:.1f}",
                f"{row['switches_per_step']:.1f}",
                f"{found['clairvoyant']['reached'].get(name, 1):.1%}",
            )
        )
    bound = found["lower_bound"]
    reached = found["clairvoyant"]["step_s"] / bound["step_s"]
    lines.append(COLUMNS.format("lower bound", f"{bound['step_s']:.1f}", "", "", "", "", "", f"{reached:.1%}"))
    for line in lines:
        console.print(f"  {line}", highlight=False)


def _print_predictions(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        low, high = row["published"]
        published = f"{low:.2f}×" if low == high else f"{low:.2f}–{high:.2f}×"
        console.print(
            f"watermark over {row['over']}, max_staleness {row['max_staleness']}: predicted {row['predicted']:.2f}×, "
            f"published {published}, error {row['error']:+.1%}; predictive {row['predictive']:.2f}×, and "
            f"{row['predictive_over_fitted_baseline']:.2f}× the baseline at the staleness of the fit",
            highlight=False,
        )
        if row["would_explain"]:
            console.print(f"  would explain it: {row['would_explain']}", highlight=False)
