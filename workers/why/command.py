"""`gyre why`: what it is asked about, and how the answer is printed. The work is done by the modules beside it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from infra.settings import Settings
from workers.errors import UsageError
from workers.printing import Json, console, show
from workers.why.wait import Answer, clock, line, merged


async def why(
    what: Annotated[str, typer.Argument(help="RUN, RUN/STEP or RUN/STEP/GROUP/INDEX; left out: the pool.")] = "",
    decisions: Annotated[int, typer.Option(min=0, max=32, help="Last decisions of the scheduler to show.")] = 5,
    as_json: Json = False,
) -> None:
    """What everything waits for: who owns the wait, why, and until when. Of an episode: why it ended as it did."""
    answers, decided = await answers_to(Settings(), what, decisions)
    now = datetime.now(UTC)
    if as_json:
        rows = [part.model_dump(mode="json") for part in answers]
        show({"at": now.isoformat(timespec="milliseconds"), "answers": rows, "decisions": decided})
        return
    for part in answers:
        print_answer(part, console, now, every="/" in what)
    print_decisions(decided, console)


async def answers_to(settings: Settings, what: str, count: int) -> tuple[list[Answer], list[dict[str, Any]]]:
    """What is known about ``what``, and the last ``count`` decisions where it is more than one episode.

    Raises UsageError for what doesn't exist, and when there is no stack.
    """
    from workers.why.episode_answer import episode_answer, path_of
    from workers.why.pool import decisions, pool_answer
    from workers.why.runs import open_runs, run_answer
    from workers.why.snapshot import take_snapshot
    from workers.why.steps import step_answer

    if (path := path_of(what)) is not None:
        return [await episode_answer(settings, path)], []
    run, _, step = what.partition("/")
    if step and not re.fullmatch(r"\d+", step):
        raise UsageError(f"{what!r} names nothing: give RUN, RUN/STEP or RUN/STEP/GROUP/INDEX")
    async with take_snapshot(settings) as snapshot:
        decided = decisions(snapshot.scheduler, count)
        if not what:
            return [await pool_answer(snapshot), *await open_runs(snapshot)], decided
        of_one = await step_answer(snapshot, run, int(step)) if step else await run_answer(snapshot, run)
        if of_one is None:
            raise UsageError(f"there is no step {int(step)} of a run {run!r}: `gyre watch {run}` shows its steps")
        of_one.waits = [*snapshot.faults, *of_one.waits]
        return [of_one], decided if of_one.waits else []  # what has ended waits for no decision


def print_answer(answer: Answer, to: Console, now: datetime, *, every: bool, depth: int = 0) -> None:
    """``every``: each wait in a line of its own; otherwise those of a kind together."""
    indent = "  " * depth
    _print(to, f"{indent}{answer.about}" + (f": {answer.facts[0]}" if answer.facts else ""), style="bold")
    for fact in answer.facts[1:]:
        _print(to, f"{indent}  {fact}")
    for wait in answer.waits if every else merged(answer.waits):
        _print(to, f"{indent}  - {line(wait, now)}")
    for moment in answer.timeline:
        _print(to, f"{indent}  {clock(moment.at, now)}  {moment.text}")
    for part in answer.parts:
        print_answer(part, to, now, every=every, depth=depth + 1)


def print_decisions(decided: list[dict[str, Any]], to: Console) -> None:
    if decided:
        _print(to, "last decisions", style="bold")
    for decision in decided:
        roles = ", ".join(f"{cell} {role}" for cell, role in sorted(decision["roles"].items()))
        _print(to, f"  {datetime.fromisoformat(decision['at']):%H:%M:%S}  {decision['reason']} → {roles}")


def _print(to: Console, text: str, style: str | None = None) -> None:
    to.print(text, style=style, highlight=False, markup=False)
