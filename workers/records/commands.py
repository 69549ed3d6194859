"""Commands that read what was recorded: episodes, gauges, replays; and verdicts that are added to it.

`workers.cli` gives them their names. They need the blob store and no stack.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from infra.settings import Settings
from infra.state.blobs import BlobStore
from workers.printing import Json, RunName, console, show


def episodes(
    run: RunName,
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    outcome: Annotated[str, typer.Option(help="Only this outcome.")] = "",
    export: Annotated[Path | None, typer.Option(help="Write a trace for `gyre simulate --trace` here.")] = None,
    as_json: Json = False,
) -> None:
    """Every episode of a run: why it ended, its reward, its calls and times, and verdicts that were given later."""
    from workers.records.episodes import episode_line, sealed_episodes
    from workers.records.regrade import later_verdicts, verdict_line

    blobs = BlobStore(Settings().blobs)
    seals = sealed_episodes(blobs, run, step, outcome)
    if export is not None:
        from workers.records.traces import export_trace

        console.print(f"{export_trace(blobs, run, seals, export)} episodes: {export}")
        return
    later = later_verdicts(blobs, run, step)
    seals = [{**seal, "verdicts": later.get(seal["exit"]["records"] or seal["episode"], [])} for seal in seals]
    if as_json:
        show(seals)
        return
    for seal in seals:
        console.print(episode_line(seal))
        for verdict in seal["verdicts"]:
            console.print(f"  {verdict_line(verdict)}", highlight=False, markup=False)


async def regrade(
    run: RunName,
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    episode: Annotated[str, typer.Option(help="Only this episode, as `gyre episodes` prints it.")] = "",
    outcome: Annotated[str, typer.Option(help="Only this outcome, such as evaluator_failed.")] = "",
    as_json: Json = False,
) -> None:
    """Run evaluators again on preserved workspaces; the new verdicts lie beside the old ones.

    Exit code 1 when an evaluator failed: the episode stays excluded.
    """
    from workers.records.regrade import LaterVerdict, verdict_line
    from workers.records.regrade import regrade as grade_again

    verdicts: list[LaterVerdict] = []

    def given(seal: dict[str, Any], verdict: LaterVerdict) -> None:
        verdicts.append(verdict)
        if not as_json:
            was = f"{seal['outcome']}, " + ("excluded" if seal["reward"] is None else f"reward {seal['reward']:.2f}")
            text = f"{verdict.episode}  was {was}; {verdict_line(verdict.model_dump())}"
            console.print(text, highlight=False, markup=False)

    try:
        await grade_again(Settings(), run, step=step, episode=episode, outcome=outcome, on_verdict=given)
    finally:
        if as_json and verdicts:
            show([verdict.model_dump() for verdict in sorted(verdicts, key=lambda verdict: verdict.episode)])
    if any(verdict.reward is None for verdict in verdicts):
        raise typer.Exit(1)


def gauges(
    run: RunName, step: Annotated[int | None, typer.Argument(help="Number of the step.")] = None, as_json: Json = False
) -> None:
    """How far serving and training disagree, and what became of what was sampled: of each step, or all of one."""
    from workers.records.gauges import of_run, of_step, print_run, print_step

    blobs = BlobStore(Settings().blobs)
    if step is None:
        results = of_run(blobs, run)
        if as_json:
            show([{"step": result.step, "train": result.train, **result.gauges} for result in results])
        else:
            print_run(results, console)
        return
    result, all_gauges = of_step(blobs, run, step)
    if as_json:
        show({"step": step, "train": result.train, "summary": result.gauges, **all_gauges.model_dump()})
    else:
        print_step(result, all_gauges, console)


def show_episode(
    episode: Annotated[str, typer.Argument(help="RUN/STEP/GROUP/INDEX, as `gyre episodes` prints it.")],
    as_json: Json = False,
) -> None:
    """The trajectory tree of an episode, readable."""
    from workers.records.episodes import episode_json, episode_tree, load_episode

    settings = Settings()
    seal, records = load_episode(BlobStore(settings.blobs), episode)
    if as_json:
        show(episode_json(seal, records))
    else:
        console.print(episode_tree(seal, records, settings.policy))


def replay(
    run: RunName, step: Annotated[int, typer.Argument(help="Number of the step.")], as_json: Json = False
) -> None:
    """Recompute a recorded step's gradient on one cell, offline, and print the difference."""
    from workers.records.replay import replay_step

    result = replay_step(Settings(), run, step)
    if as_json:
        show(result.model_dump())
    else:
        console.print(result.describe())
    if not result.equal:
        raise typer.Exit(1)
