"""The `gyre` command. Every command answers a fault with one clear line and exit code 2.

Commands are thin: they read arguments, call one function, and print. Read commands take `--json`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError
from temporalio.client import Client, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.service import RPCError, RPCStatusCode

from infra.settings import Settings
from infra.state.redis import redis_client
from infra.temporal import TemporalUnreachable, connect
from workers.errors import UsageError
from workers.leaving import leave
from workers.printing import Json, RunName, console, show
from workers.records import commands
from workers.simulate.command import simulate
from workers.why.command import why
from workflows import names
from workflows.contracts.results import PauseRequest, SubmitStep
from workflows.run import Run

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Train coding agents, durably.")
submit = typer.Typer(no_args_is_help=True, help="Submit a run, or a step of a run.")
app.add_typer(submit, name="submit")
harness = typer.Typer(no_args_is_help=True, help="The harnesses that gyre runs: list, install, check.")
app.add_typer(harness, name="harness")

P = ParamSpec("P")


def command(function: Callable[P, Coroutine[Any, Any, None] | None]) -> Callable[P, None]:
    """A command, async or not: faults of use become one line on stderr and exit code 2."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            if (running := function(*args, **kwargs)) is not None:
                asyncio.run(running)
        except (UsageError, TemporalUnreachable) as error:
            fail(str(error))
        except ValidationError as error:
            from workers.configuration import describe

            fail(f"settings: {describe(error)} (environment variables GYRE_*)")
        except RedisError as error:
            mend = "start the local stack with `gyre up`, or set GYRE_REDIS_URL"
            fail(f"no Redis at {Settings().redis}: {mend} ({error})")
        except WorkflowUpdateFailedError as error:
            fail(str(error.cause or error))
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                fail("there is no such run, or it has ended: `gyre status` lists the runs")
            if error.status in (RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED):
                fail("the control worker does not answer: `gyre why` says what runs and what doesn't")
            fail(f"Temporal: {error}")
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return run


def fail(message: str) -> None:
    print(f"gyre: {message}", file=sys.stderr)
    raise typer.Exit(2)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Settings, Client, Redis]]:
    settings = Settings()
    client = await connect(settings)
    async with redis_client(settings.redis) as redis:
        await redis.ping()
        yield settings, client, redis


@asynccontextmanager
async def workflow_of(run: str) -> AsyncIterator[WorkflowHandle[Run, Any]]:
    async with connected() as (_, client, _redis):
        yield client.get_workflow_handle_for(Run.run, names.run_id(run))


# --- the local stack ----------------------------------------------------------------------------------------------


@app.command()
@command
async def up() -> None:
    """Start the local stack: Temporal, Valkey, the proxy, workers and cells."""
    from workers.stack import local

    settings = Settings()
    await local.up(settings, console.print)
    console.print(f"the stack is up; Temporal UI: {settings.temporal_ui}")


@app.command()
@command
async def down() -> None:
    """End the local stack. Its state stays in GYRE_HOME."""
    from workers.stack import local

    settings = Settings()
    console.print("the stack is down" if await local.down(settings) else "nothing was running")
    if left := local.running_harnesses(settings):
        console.print(f"{left} harnesses run on: they go on with `gyre up`, or end with their budget")


@app.command()
@command
async def status(as_json: Json = False) -> None:
    """Processes, cells and runs."""
    from workers.stack.status import collect, print_status

    seen = await collect(Settings())
    if as_json:
        show(seen)
    else:
        print_status(seen, console)


@app.command()
@command
async def doctor(
    dialects: Annotated[bool, typer.Option("--dialects", help="Print how request fields are treated.")] = False,
    as_json: Json = False,
) -> None:
    """Check every component and say how to mend what is wrong. Exit code 1 when something is."""
    if dialects:
        from workers import dialects as tables

        if as_json:
            show(tables.as_json())
        else:
            tables.print_tables(console)
        return
    from workers.stack.doctor import examine

    diagnoses = await examine(Settings())
    if as_json:
        show([diagnosis.model_dump() for diagnosis in diagnoses])
    else:
        for diagnosis in diagnoses:
            mark = "[green]ok  [/]" if diagnosis.ok else "[red]fault[/]"
            console.print(f"{mark} {diagnosis.part:<16} {diagnosis.detail}")
            if not diagnosis.ok and diagnosis.mend:
                console.print(f"      mend: {diagnosis.mend}")
    if not all(diagnosis.ok for diagnosis in diagnoses):
        raise typer.Exit(1)


# --- runs ---------------------------------------------------------------------------------------------------------


@submit.command("run")
@command
async def submit_run(
    config: Annotated[Path, typer.Argument(help="Run configuration (TOML).")],
    follow: Annotated[bool, typer.Option("--watch", help="Show progress until the run has ended.")] = False,
) -> None:
    """Start a run from a configuration file."""
    from workers import progress
    from workers.configuration import check, read_config

    read = read_config(config)
    async with connected() as (settings, client, redis):
        check(read, settings)
        summary = f"run {read.name}: {read.steps} updates of {read.tasks_per_step} × {read.group_size}"
        await progress.start_run(client, settings, read, summary)
        console.print(f"run {read.name} is submitted: gyre watch {read.name}")
        if follow:
            await progress.watch(client, redis, settings, read.name, console=console)


@submit.command("step")
@command
async def submit_step(
    run: Annotated[str, typer.Option("--run", help="Name of the run.")],
    train: Annotated[bool, typer.Option("--train", help="A training step; otherwise an evaluation.")] = False,
    tasks: Annotated[int, typer.Option(help="How many tasks.")] = 200,
    request_id: Annotated[str, typer.Option(help="Repeat a request under the same id without doing it twice.")] = "",
) -> None:
    """Queue a step of a run that goes on."""
    request = SubmitStep(request_id=request_id or uuid.uuid4().hex, train=train, tasks=tasks)
    async with workflow_of(run) as handle:
        queued = await handle.execute_update(Run.submit_step, request, id=request.request_id)
    console.print(f"queued: {queued} step(s) wait")


@app.command()
@command
async def watch(run: RunName, as_json: Json = False) -> None:
    """Live progress of a run: step, watermark, the cells' roles, pass rate."""
    from workers import progress

    async with connected() as (settings, client, redis):
        if as_json:
            show(progress.as_json(await progress.look(client, redis, settings, run)))
        else:
            await progress.watch(client, redis, settings, run, console=console)


@app.command()
@command
async def pause(
    run: RunName, hold: Annotated[bool, typer.Option(help="Also hold the calls of running episodes.")] = False
) -> None:
    """Stop admitting episodes; running ones go to their end."""
    request = PauseRequest(request_id=uuid.uuid4().hex, hold=hold)
    async with workflow_of(run) as handle:
        console.print(await handle.execute_update(Run.pause, request))


@app.command()
@command
async def resume(run: RunName) -> None:
    """Go on after a pause."""
    request = PauseRequest(request_id=uuid.uuid4().hex)
    async with workflow_of(run) as handle:
        console.print(await handle.execute_update(Run.resume, request))


@app.command()
@command
async def resize(cells: Annotated[list[str], typer.Argument(help="Names of all cells of the pool.")]) -> None:
    """Set the cells of the pool, while runs go on. One that joins must have its processes already.

    A cell that is left out moves its calls to the others; what it has summed of an open step is trained again by them.
    """
    from workers.stack.resizing import resize as set_cells

    async with connected() as (settings, client, _redis):
        console.print(", ".join(await set_cells(client, settings, cells)))


@app.command()
@command
async def cancel(run: RunName) -> None:
    """Cancel a run, its steps and its episodes; what was trained stays."""
    async with workflow_of(run) as handle:
        await handle.cancel()
    console.print(f"run {run} is being cancelled")


# --- what was recorded --------------------------------------------------------------------------------------------

app.command("episodes")(command(commands.episodes))
app.command("show")(command(commands.show_episode))
app.command("gauges")(command(commands.gauges))
app.command("regrade")(command(commands.regrade))
app.command("replay")(command(commands.replay))


# --- harnesses ----------------------------------------------------------------------------------------------------

HarnessName = Annotated[str, typer.Argument(help="Name of the harness.")]


@harness.command("list")
@command
def harness_list(as_json: Json = False) -> None:
    """Every harness that there is, its version, the package that brings it, and what is missing for it here."""
    from workers.harness_check.command import listed

    rows = listed(Settings())
    if as_json:
        show(rows)
        return
    for row in rows:
        package = f"({row['package']})" if row["package"] else ""
        words = (row["name"], row["version"], package, row["missing"] or "ready")
        console.print(" ".join(filter(None, words)), highlight=False)


@harness.command("install")
@command
def harness_install(name: HarnessName) -> None:
    """Install the pinned version of a harness into a folder of its own."""
    from workers.harness_check.command import install_harness

    console.print(str(install_harness(name, Settings())))


@harness.command("check")
@command
async def harness_check(
    name: HarnessName,
    scenario: Annotated[list[str] | None, typer.Option(help="Only this one, repeatable; `slow` takes minutes.")] = None,
    turns: Annotated[int, typer.Option(min=15, max=300, help="Turns of the scenario `loop`.")] = 16,
    as_json: Json = False,
) -> None:
    """Run a real harness against a scripted policy and say what held. Exit code 1 when something didn't."""
    from workers.harness_check.command import as_json as reported
    from workers.harness_check.command import check, show_report

    checking = asyncio.ensure_future(check(name, scenario or [], Settings().harnesses, turns))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, checking.cancel)  # nothing may be left running
    try:
        reports = await checking
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    if as_json:
        show([reported(report) for report in reports])
    else:
        for report in reports:
            show_report(console, report)
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


# --- foresight and sight ------------------------------------------------------------------------------------------

app.command("simulate")(command(simulate))
app.command("why")(command(why))


# --- quickstart ---------------------------------------------------------------------------------------------------


@app.command()
@command
def policy(seed: Annotated[int, typer.Option(help="Seed of the warm start.")] = 0) -> None:
    """Make the tiny policy (about a minute of CPU), or reuse it; prints its folder."""
    from workers.quickstart import prepare

    console.print(str(prepare(seed, console.print)))


@app.command()
@command
async def quickstart(
    seed: Annotated[int, typer.Option(help="Seed of the policy, the tasks and the run.")] = 0,
    steps: Annotated[int, typer.Option(help="Updates.")] = 20,
    staleness: Annotated[int, typer.Option(help="max_staleness of the run.")] = 0,
    keep: Annotated[bool, typer.Option(help="Leave the stack running at the end.")] = False,
) -> None:
    """Prepare the tiny policy, start the stack, train it, draw its pass-rate curve."""
    from workers.quickstart import run_quickstart

    await run_quickstart(seed=seed, steps=steps, staleness=staleness, keep=keep, console=console)


def main() -> None:
    code = 0
    try:
        app()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    leave(code)


if __name__ == "__main__":
    main()
