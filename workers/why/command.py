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
    settings = Settings()
    answers, decided = await answer(settings, what, decisions)
    now = datetime.now(UTC)
    if as_json:
        told = [one.model_dump(mode="json") for one in answers]
        show({"at": now.isoformat(timespec="milliseconds"), "answers": told, "decisions": decided})
        return
    one_thing = "/" in what
    for one in answers:
        print_answer(one, console, now, every=one_thing)
    print_decisions(decided, console)


async def answer(settings: Settings, what: str, count: int) -> tuple[list[Answer], list[dict[str, Any]]]:
    """What is known about ``what``, and the last ``count`` decisions where it is more than one episode.

    Raises UsageError for what doesn't exist, and when there is no stack.
    """
    from workers.why.one_episode import episode_answer, place_of
    from workers.why.pool import decisions, pool_answer
    from workers.why.runs import open_runs, run_answer
    from workers.why.sight import look
    from workers.why.steps import step_answer

    if (place := place_of(what)) is not None:
        return [await episode_answer(settings, place)], []
    run, _, step = what.partition("/")
    if step and not re.fullmatch(r"\d+", step):
        raise UsageError(f"{what!r} names nothing: give RUN, RUN/STEP or RUN/STEP/GROUP/INDEX")
    async with look(settings) as sight:
        decided = decisions(sight.scheduler, count)
        if not what:
            return [await pool_answer(sight), *await open_runs(sight)], decided
        if not step:
            found = await run_answer(sight, run)
        else:
            of_step = await step_answer(sight, run, int(step))
            if of_step is None:
                raise UsageError(f"there is no step {int(step)} of a run {run!r}: `gyre watch {run}` shows its steps")
            found = of_step
        found.waits = [*sight.faults, *found.waits]
        return [found], decided if found.waits else []  # what has ended waits for no decision


def print_answer(told: Answer, to: Console, now: datetime, *, every: bool, depth: int = 0) -> None:
    """``every``: each wait in a line of its own; otherwise those of a kind together."""
    indent = "  " * depth
    _print(to, f"{indent}{told.about}" + (f": {told.facts[0]}" if told.facts else ""), style="bold")
    for fact in told.facts[1:]:
        _print(to, f"{indent}  {fact}")
    for wait in told.waits if every else merged(told.waits):
        _print(to, f"{indent}  - {line(wait, now)}")
    for moment in told.timeline:
        _print(to, f"{indent}  {clock(moment.at, now)}  {moment.text}")
    for part in told.parts:
        print_answer(part, to, now, every=every, depth=depth + 1)


def print_decisions(decided: list[dict[str, Any]], to: Console) -> None:
    if decided:
        _print(to, "last decisions", style="bold")
    for one in decided:
        roles = ", ".join(f"{cell} {role}" for cell, role in sorted(one["roles"].items()))
        _print(to, f"  {datetime.fromisoformat(one['at']):%H:%M:%S}  {one['reason']} → {roles}")


def _print(to: Console, text: str, style: str | None = None) -> None:
    to.print(text, style=style, highlight=False, markup=False)
