"""`gyre simulate`: its options, and what it prints. The work is done by the modules beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.errors import UsageError
from workers.printing import Json, console, show

if TYPE_CHECKING:
    from workers.simulate.predicted import Case
    from workers.simulate.workloads import Workload

Count = int | None
Number = float | None
Words = list[str] | None
Rows = list[dict[str, Any]]


def _option(name: str, meaning: str, *, least: float | None = None, most: float | None = None) -> Any:
    return typer.Option(name, help=meaning, min=least, max=most)


def _seconds(name: str, meaning: str) -> Any:
    return typer.Option(name, help=meaning, min=0)


def simulate(
    context: typer.Context,
    workload: Annotated[str, typer.Argument(help="Name of a workload; `list` names them.")] = "",
    *,
    trace: Annotated[Path | None, typer.Option(help="Episodes of a run, by `gyre episodes RUN --export FILE`.")] = None,
    staleness: Annotated[list[int] | None, typer.Option(min=0, max=2, help="max_staleness, repeatable.")] = None,
    steps: Annotated[Count, _option("--steps", "Steps to simulate.", least=1)] = None,
    # Those that are named as a figure of `PoolModel` replace it.
    cells: Annotated[Count, _option("--cells", "Cells of the pool.", least=1)] = None,
    capacity: Annotated[Count, _option("--capacity", "Episodes that a serving cell holds at once.", least=1)] = None,
    slots: Annotated[
        Count,
        _option("--slots", "Episodes that run at once, whatever serves; left out, those of --capacity.", least=0),
    ] = None,
    train_tokens_per_s: Annotated[Number, _option("--training", "Tokens per second that one cell trains.")] = None,
    switch_out_s: Annotated[Number, _seconds("--switch-out", "Seconds from rollout to training.")] = None,
    switch_in_s: Annotated[Number, _seconds("--switch-in", "Seconds from training to rollout.")] = None,
    publish_s: Annotated[Number, _seconds("--publish", "Seconds in which a cell takes new weights.")] = None,
    update_s: Annotated[Number, _seconds("--update", "Seconds of the optimizer step and its commit.")] = None,
    gather_s: Annotated[Number, _seconds("--gather", "Seconds added to the update for each satellite.")] = None,
    open_s: Annotated[
        Number, _seconds("--open", "Seconds from a commit to the first episodes of the next step.")
    ] = None,
    start_s: Annotated[Number, _seconds("--start", "Start-up of an episode, not charged to its budget.")] = None,
    grade_s: Annotated[Number, _seconds("--grade", "Seconds to grade and process a group.")] = None,
    move_s: Annotated[Number, _seconds("--move", "Seconds that a drained cell's episodes compute again.")] = None,
    claim_overhead_s: Annotated[Number, _seconds("--overhead", "Seconds of a claim beyond its tokens.")] = None,
    micro_step_tokens: Annotated[Count, _option("--micro-step", "Tokens of a micro-step.", least=1)] = None,
    claim: Annotated[Number, _option("--claim", "Seconds of training in a claim (claim_s).", least=0.001)] = None,
    poll_s: Annotated[Number, _seconds("--poll", "Seconds between looks of the policy.")] = None,
    split: Annotated[Count, _option("--split", "Training cells of async; left out, the best split.", least=1)] = None,
    lose: Annotated[
        Words, _option("--lose", "CELL@SECONDS[:SECONDS]: a cell is lost, and back after so long; repeatable.")
    ] = None,
    resize: Annotated[
        Words, _option("--resize", "CELLS@SECONDS: the pool has so many cells from then on; repeatable.")
    ] = None,
    solo_speedup: Annotated[
        Number, _option("--solo", "Speed of an episode alone on a cell over a full one.", least=1)
    ] = None,
    tool_share: Annotated[
        Number, _option("--tools", "Share of an episode's time on a full cell that tools take.", least=0, most=1)
    ] = None,
    limit_s: Annotated[Number, _option("--limit", "Active budget of an episode, seconds.")] = None,
    seed: Annotated[Count, _option("--seed", "Seed of a named workload's episodes.")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Fit again on the published baselines (minutes).")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw what each cell does.")] = None,
    as_json: Json = False,
) -> None:
    """Compare the scheduling policies on a workload: time per step, speed-up, utilisation, idle GPU-hours, switches."""
    from workers.records.traces import read_trace
    from workers.simulate.absences import with_absences
    from workers.simulate.compare import compare, priced
    from workers.simulate.predicted import Case, predictions
    from workers.simulate.timeline import draw_timeline
    from workers.simulate.trace import pool_for, pool_of, steps_of
    from workflows.simulation.workload import PoolModel

    changes = {name: context.params[name] for name in PoolModel.model_fields if context.params.get(name) is not None}
    if bool(workload) == (trace is not None):
        raise UsageError("name a workload or give --trace FILE: `gyre simulate list` names the workloads")
    if workload == "list":
        _list(as_json)
        return
    if fit:
        _fit(_named(workload), as_json)
        return
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
        pool = with_absences(pool, lose or [], resize or [])
        work = work[: steps or len(work)]
        compared = compare(
            pool,
            work,
            max_staleness=level,
            scheduler=priced(pool).model_copy(update={} if claim is None else {"claim_s": claim}),
            split=split,
            gpus_per_cell=named.gpus_per_cell if named else 0,
            timeline=png is not None,
        )
        cases.append(Case(compared, work, split_of))
    title, last = workload or str(trace), cases[-1].comparison
    predicted = None
    if named is not None and not (changes or lose or resize or claim or split or steps):
        predicted = predictions(named, cases)
    if png is not None:
        draw_timeline(last.runs, png, steps=3, title=f"{title}, max_staleness {last.max_staleness}")
    if as_json:
        show(_as_json(title, named, cases, predicted))
        return
    for line in _lines(named, cases, predicted or []) + ([f"timeline: {png}"] if png is not None else []):
        console.print(line, highlight=False)


def _as_json(title: str, named: Workload | None, cases: list[Case], predicted: Rows | None) -> dict[str, Any]:
    report: dict[str, Any] = {
        "workload": title,
        "pool": cases[-1].comparison.pool.model_dump(),
        "compared": [case.comparison.as_json() for case in cases],
    }
    if named is not None:
        report |= {"about": named.about, "sources": named.sources, "fit": named.fit, "prediction": predicted}
    return report


def _lines(named: Workload | None, cases: list[Case], predicted: Rows) -> list[str]:
    from workers.simulate.predicted import sentences
    from workers.simulate.tables import lines_of

    lines = [] if named is None else _parameters(named)
    for case in cases:
        lines += lines_of(case.comparison.as_json())
    for row in predicted:
        lines += sentences(row)
    return lines


def _named(name: str) -> Workload:
    from workers.simulate.workloads import WORKLOADS

    if name not in WORKLOADS:
        raise UsageError(f"there is no workload {name!r}: there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def _fit(named: Workload, as_json: bool) -> None:
    from workers.simulate.fitting import HYPOTHESES, Extent, central, fits
    from workers.simulate.workloads import PUBLISHED_HOURS, STEPS

    if named.name != "nl2repobench-2.4t":
        raise UsageError(f"{named.name} can't be fitted: {named.fit}")
    baselines = {name: PUBLISHED_HOURS[name] for name in ("async", "colocate")}
    every = []
    for hypothesis in HYPOTHESES:
        for fit in fits(hypothesis, baselines, Extent(named.pool.cells, steps=6, of=STEPS)):
            every.append(fit)
            if not as_json:
                console.print(f"{fit.hypothesis} training {fit.training:.3f} {fit.hours}", highlight=False)
    middle = {}
    for level in sorted({fit.hypothesis.max_staleness for fit in every}):
        rough = central(every, level)
        whole = Extent(named.pool.cells, steps=STEPS, of=STEPS)
        middle[level] = next(fits(rough.hypothesis, baselines, whole, around=rough.training), rough)
    if as_json:
        rows = [fit.as_json() for fit in every]
        central_rows = {level: fit.as_json() for level, fit in middle.items()}
        show({"hypotheses": len(HYPOTHESES), "fits": rows, "central": central_rows})
        return
    for level, chosen in middle.items():
        hours = sorted(fit.hours["watermark"] for fit in every if fit.hypothesis.max_staleness == level)
        console.print(
            f"max_staleness {level}: {len(hours)} fits reproduce the baselines; they predict {hours[0]:.1f} to "
            f"{hours[-1]:.1f} h for watermark, {chosen.hours['watermark']:.1f} h in the middle "
            f"(published: {PUBLISHED_HOURS['watermark']} h): {chosen.hypothesis}",
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
