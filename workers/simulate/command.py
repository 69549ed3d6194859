"""`gyre simulate`: its options, and what it prints. The work is done by the modules beside it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.errors import UsageError
from workers.printing import Json, console, show

if TYPE_CHECKING:
    from workers.simulate.workloads import Workload


async def simulate(
    workload: Annotated[str, typer.Argument(help="Name of a workload; `list` names them.")] = "",
    *,
    trace: Annotated[Path | None, typer.Option(help="Episodes of a run, by `gyre episodes RUN --export FILE`.")] = None,
    staleness: Annotated[list[int] | None, typer.Option(min=0, max=2, help="max_staleness, repeatable.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to simulate.")] = None,
    cells: Annotated[int | None, typer.Option(min=1, help="Cells of the pool.")] = None,
    capacity: Annotated[int | None, typer.Option(min=1, help="Episodes that a serving cell holds at once.")] = None,
    slots: Annotated[
        int | None,
        typer.Option(min=0, help="Episodes that run at once, whatever serves; left out, those of --capacity."),
    ] = None,
    training: Annotated[float | None, typer.Option(help="Tokens per second that one cell trains.")] = None,
    switch_out: Annotated[float | None, typer.Option(min=0, help="Seconds from rollout to training.")] = None,
    switch_in: Annotated[float | None, typer.Option(min=0, help="Seconds from training to rollout.")] = None,
    publish: Annotated[float | None, typer.Option(min=0, help="Seconds in which a cell takes new weights.")] = None,
    update: Annotated[float | None, typer.Option(min=0, help="Seconds of the optimizer step and its commit.")] = None,
    gather: Annotated[float | None, typer.Option(min=0, help="Seconds added to the update for each satellite.")] = None,
    opening: Annotated[
        float | None,
        typer.Option("--open", min=0, help="Seconds from a commit to the first episodes of the next step."),
    ] = None,
    start: Annotated[
        float | None, typer.Option(min=0, help="Start-up of an episode, not charged to its budget.")
    ] = None,
    grade: Annotated[float | None, typer.Option(min=0, help="Seconds to grade and process a group.")] = None,
    move: Annotated[
        float | None, typer.Option(min=0, help="Seconds that a drained cell's episodes compute again.")
    ] = None,
    overhead: Annotated[float | None, typer.Option(min=0, help="Seconds of a claim beyond its tokens.")] = None,
    micro_step: Annotated[int | None, typer.Option(min=1, help="Tokens of a micro-step.")] = None,
    claim: Annotated[float | None, typer.Option(min=0.001, help="Seconds of training in a claim (claim_s).")] = None,
    poll: Annotated[float | None, typer.Option(min=0, help="Seconds between looks of the policy.")] = None,
    split: Annotated[int | None, typer.Option(min=1, help="Training cells of async; left out, the best split.")] = None,
    lose: Annotated[
        list[str] | None,
        typer.Option(help="CELL@SECONDS[:SECONDS]: a cell is lost, and back after so long; repeatable."),
    ] = None,
    resize: Annotated[
        list[str] | None, typer.Option(help="CELLS@SECONDS: the pool has so many cells from then on; repeatable.")
    ] = None,
    solo: Annotated[
        float | None, typer.Option(min=1, help="Speed of an episode alone on a cell over a full one.")
    ] = None,
    tools: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of an episode's time on a full cell that tools take.")
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
        "slots": slots,
        "train_tokens_per_s": training,
        "switch_out_s": switch_out,
        "switch_in_s": switch_in,
        "publish_s": publish,
        "update_s": update,
        "gather_s": gather,
        "open_s": opening,
        "start_s": start,
        "grade_s": grade,
        "move_s": move,
        "claim_overhead_s": overhead,
        "micro_step_tokens": micro_step,
        "poll_s": poll,
        "solo_speedup": solo,
        "tool_share": tools,
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
            _simulate,
            workload,
            trace,
            changes,
            claim_s=claim,
            split=split,
            lose=lose or [],
            resize=resize or [],
            staleness=staleness,
            steps=steps,
            seed=seed,
            png=png,
            as_json=as_json,
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
    claim_s: float | None,
    split: int | None,
    lose: list[str],
    resize: list[str],
    staleness: list[int] | None,
    steps: int | None,
    seed: int | None,
    png: Path | None,
    as_json: bool,
) -> None:
    from workers.simulate.absences import with_absences
    from workers.simulate.compare import compare, priced
    from workers.simulate.predicted import Case, predictions, sentences
    from workers.simulate.tables import lines_of
    from workers.simulate.timeline import draw_timeline
    from workers.simulate.trace import pool_for, pool_of, read_trace, steps_of

    named = None if trace is not None else _named(workload)
    traced = read_trace(trace) if trace is not None else []
    cases = []
    for level in staleness or ([0] if named is None else [0, 1]):
        if named is None:
            pool, split_of = pool_for(traced, changes), 0
            work = steps_of(traced, pool)
        else:
            pool, drawn, split_of = named.at(level)
            pool = pool_of({**pool.model_dump(), **changes})
            work = drawn.model_copy(update={"seed": seed} if seed is not None else {}).draw()
        pool = with_absences(pool, lose, resize)
        work = work[: steps or len(work)]
        compared = compare(
            pool,
            work,
            max_staleness=level,
            scheduler=priced(pool).model_copy(update={} if claim_s is None else {"claim_s": claim_s}),
            split=split,
            gpus_per_cell=named.gpus_per_cell if named else 0,
            timeline=png is not None,
        )
        cases.append(Case(compared, work, split_of))
    title, last = workload or str(trace), cases[-1].comparison
    predicted = None
    if named is not None and not (changes or lose or resize or claim_s or split or steps):
        predicted = predictions(named, cases)
    if png is not None:
        draw_timeline(last.runs, png, steps=3, title=f"{title}, max_staleness {last.max_staleness}")
    if as_json:
        found: dict[str, Any] = {
            "workload": title,
            "pool": last.pool.model_dump(),
            "compared": [case.comparison.as_json() for case in cases],
        }
        if named is not None:
            found |= {"about": named.about, "sources": named.sources, "fit": named.fit, "prediction": predicted}
        show(found)
        return
    lines = [] if named is None else _parameters(named)
    for case in cases:
        lines += lines_of(case.comparison.as_json())
    for row in predicted or []:
        lines += sentences(row)
    if png is not None:
        lines.append(f"timeline: {png}")
    for line in lines:
        console.print(line, highlight=False)


def _fit(workload: str, as_json: bool) -> None:
    from workers.simulate.fitting import HYPOTHESES, central, fits
    from workers.simulate.workloads import PUBLISHED_HOURS, STEPS

    named = _named(workload)
    if named.name != "nl2repobench-2.4t":
        raise UsageError(f"{workload} can't be fitted: {named.fit}")
    baselines = {name: PUBLISHED_HOURS[name] for name in ("async", "colocate")}
    found = []
    for hypothesis in HYPOTHESES:
        for one in fits(hypothesis, cells=named.pool.cells, published=baselines, steps=6, published_steps=STEPS):
            found.append(one)
            if not as_json:
                console.print(f"{one.hypothesis} training {one.training:.3f} {one.hours}", highlight=False)
    levels = sorted({one.hypothesis.max_staleness for one in found})
    middle = {}
    for level in levels:
        rough = central(found, level)
        refined = fits(
            rough.hypothesis,
            cells=named.pool.cells,
            published=baselines,
            steps=STEPS,
            published_steps=STEPS,
            around=rough.training,
        )
        middle[level] = next(refined, rough)
    if as_json:
        rows = [{**one._asdict(), "hypothesis": one.hypothesis._asdict()} for one in found]
        central_rows = {
            level: {**one._asdict(), "hypothesis": one.hypothesis._asdict()} for level, one in middle.items()
        }
        show({"hypotheses": len(HYPOTHESES), "fits": rows, "central": central_rows})
        return
    for level, one in middle.items():
        hours = sorted(fit.hours["watermark"] for fit in found if fit.hypothesis.max_staleness == level)
        console.print(
            f"max_staleness {level}: {len(hours)} fits reproduce the baselines; they predict {hours[0]:.1f} to "
            f"{hours[-1]:.1f} h for watermark, {one.hours['watermark']:.1f} h in the middle "
            f"(published: {PUBLISHED_HOURS['watermark']} h): {one.hypothesis}",
            highlight=False,
        )


def _list(as_json: bool) -> None:
    from workers.simulate.workloads import WORKLOADS

    if as_json:
        show({name: workload.model_dump() for name, workload in WORKLOADS.items()})
        return
    for name, workload in WORKLOADS.items():
        console.print(f"{name}: {workload.about}", highlight=False)


def _parameters(named: Workload) -> list[str]:
    lines = [f"{named.name}: {named.about}"]
    for title, (pool, work, _) in {"": named.at(0), " at max_staleness 1": named.at(1)}.items():
        values = {**pool.model_dump(), **work.model_dump()}
        for source in ("published", "fitted", "assumed") if not title else ("fitted",):
            of = [f"{name} {values[name]:g}" for name, where in named.sources.items() if where == source]
            if of or not title:
                lines.append(f"  {source}{title}: {', '.join(of) or 'nothing'}")
    return [*lines, f"  fit: {named.fit}"]
