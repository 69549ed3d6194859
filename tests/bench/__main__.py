"""The benches: ``python -m tests.bench NAME``, as `make bench` runs them. What is measured is imported when it is run.

A bench holds parts of gyre against stated limits. Exit code 1 when a limit doesn't hold, 2 for a fault of use.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tests.bench.processes import add_to_path
from workers.cli import command
from workers.errors import UsageError
from workers.leaving import leave

CHECKOUT = Path(__file__).parents[2]
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure parts of gyre against stated limits.",
)


def _report(result: dict[str, Any], show: Callable[[dict[str, Any], Console], None], *, as_json: bool) -> None:
    """Print what was measured; exit code 1 when a limit doesn't hold."""
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        show(result, Console(soft_wrap=True))
    if not result["holds"]:
        raise typer.Exit(1)


@app.command("proxy")
@command
async def bench_proxy(
    *,
    turns: Annotated[int, typer.Option(min=10, help="Turns of the long episode.")] = 300,
    tokens: Annotated[int, typer.Option(min=20_000, help="Tokens to which it grows.")] = 700_000,
    episodes: Annotated[int, typer.Option(min=2, help="Episodes that run at once.")] = 256,
    small: Annotated[bool, typer.Option("--small", help="A run of seconds, with limits for its size.")] = False,
    dialect: Annotated[str, typer.Option(help="openai_chat or anthropic.")] = "openai_chat",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What the proxy costs, with a scripted engine. Exit code 1 when a limit doesn't hold."""
    from tests.bench.proxy import CACHE, SMALL, ProxyBenchSizes, measure, print_bench

    sizes = SMALL if small else {"turns": turns, "tokens": tokens, "episodes": episodes}
    result = await measure(ProxyBenchSizes.model_validate({**sizes, "dialect": dialect}), CACHE)
    _report(result, print_bench, as_json=as_json)


@app.command("trajectory")
@command
async def bench_trajectory(
    *,
    episodes: Annotated[int, typer.Option(min=2, help="Episodes of the synthetic step.")] = 16,
    group_size: Annotated[int, typer.Option(min=2, help="Episodes of a group.")] = 8,
    tokens: Annotated[int, typer.Option(min=20_000, help="Unique tokens of an episode, about.")] = 700_000,
    budget: Annotated[int, typer.Option(min=1, help="Tokens of a micro-step.")] = 262_144,
    full: Annotated[bool, typer.Option("--full", help="A whole step: 512 episodes in groups of 16.")] = False,
    small: Annotated[bool, typer.Option("--small", help="A run of seconds, with the same limits.")] = False,
    training: Annotated[bool, typer.Option(help="Also measure forward and backward passes.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What trajectories cost: from call records to micro-steps, and to train. Exit code 1 when a limit doesn't hold."""
    from tests.bench import trajectory

    if full or small:
        episodes, group_size = (trajectory.FULL, 16) if full else (trajectory.SMALL, trajectory.SMALL)
    plan = trajectory.TrajectoryBenchSizes(episodes=episodes, group_size=group_size, tokens=tokens, token_budget=budget)
    result = {"processor": await asyncio.to_thread(trajectory.measure, plan)}
    lines = [trajectory.describe(result["processor"])]
    if training:
        from tests.bench import training as passes  # torch: only now

        sizes = passes.TrainingBenchSizes.model_validate(passes.SMALL if small else {})
        result["training"] = await asyncio.to_thread(passes.measure, sizes)
        lines.append(trajectory.describe_training(result["training"]))
    holds = all(part["holds"] for part in result.values())
    _report(
        {**result, "holds": holds},
        lambda _, console: console.print("\n".join(lines), highlight=False),
        as_json=as_json,
    )


@app.command("elastic")
@command
async def bench_elastic(
    *,
    policies: Annotated[
        str, typer.Option(help="Which take turns, by comma; async stands for every static split.")
    ] = "predictive,colocate,async,watermark",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each policy.")] = 5,
    staleness: Annotated[int, typer.Option(min=0, max=2, help="max_staleness of every run.")] = 0,
    cpu: Annotated[float | None, typer.Option(min=0.05, help="Cores of each of the three cells.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the episodes and of the order of turns.")] = 0,
    minutes: Annotated[float, typer.Option(help="No round begins that would not end within this time.")] = 40.0,
    home: Annotated[Path | None, typer.Option(help="Keep the stack's state and the traces here.")] = None,
    port_base: Annotated[int | None, typer.Option(help="First port of the stack; left out, free ones.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Two policies, two cells, few episodes: no figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Elastic scheduling against Colocate and static splits, on cells with quotas. Exit code 1 when a limit fails."""
    from tests.bench.elastic.bench import SMALL, ElasticBench, ElasticBenchPlan, show_result
    from workers.quickstart import prepare
    from workflows.scheduling.policies import POLICIES

    if unknown := sorted(set(policies.split(",")) - POLICIES.keys()):
        raise UsageError(f"--policies: there is no policy {unknown[0]!r}; there are {', '.join(POLICIES)}")
    progress = Console(stderr=True, soft_wrap=True)
    sizes = SMALL if small else {"policies": tuple(policies.split(",")), "rounds": rounds}
    if staleness and not small:  # overlapping steps are measured several to a run
        sizes |= {"rounds": math.ceil(rounds / 3), "steps": 3}
    if home is not None and home.exists() and any(home.iterdir()):
        raise UsageError(f"--home {home} holds something: name a new folder")
    more = {"staleness": staleness, "seed": seed, "minutes": minutes} | ({"cell_cpu": cpu} if cpu else {})
    plan = ElasticBenchPlan.model_validate({**sizes, **more})
    policy = await asyncio.to_thread(prepare, 0, progress.print)
    with tempfile.TemporaryDirectory(prefix="gyre-elastic-", ignore_cleanup_errors=True) as scratch:
        bench = ElasticBench(plan, policy.absolute(), home or Path(scratch), port_base, progress.print)
        running = asyncio.ensure_future(bench.run())
        for number in (signal.SIGTERM, signal.SIGINT):  # nothing may be left running, however often it is asked
            asyncio.get_running_loop().add_signal_handler(number, running.cancel, f"signal {number}")
        try:
            result = await running
        except asyncio.CancelledError as stopped:
            raise UsageError(f"ended before its figures were there ({stopped or 'a call was cancelled'})") from stopped
    _report(result, show_result, as_json=as_json)


@app.command("migration")
@command
async def bench_migration(
    *,
    episodes: Annotated[int, typer.Option(min=1, max=10, help="Episodes that are in the middle of a turn.")] = 6,
    prefix: Annotated[int, typer.Option(min=1000, max=6000, help="Tokens of each one's prompt.")] = 5000,
    small: Annotated[bool, typer.Option("--small", help="A smaller run, with the same limits.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a prefix's KV does when its call moves to another cell. Exit code 1 when a limit doesn't hold."""
    from tests.bench.migration import SMALL, MigrationBenchSizes, measure, print_bench  # torch: only now
    from workers.quickstart import prepare

    progress = Console(stderr=True, soft_wrap=True)
    sizes = MigrationBenchSizes.model_validate(SMALL if small else {"episodes": episodes, "prefix": prefix})
    policy = await asyncio.to_thread(prepare, 0, progress.print)
    measuring = asyncio.ensure_future(measure(sizes, policy.absolute()))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, measuring.cancel)  # nothing may be left running
    try:
        result = await measuring
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    _report(result, print_bench, as_json=as_json)


def main() -> None:
    add_to_path(CHECKOUT)
    code = 0
    try:
        app(prog_name="bench")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    leave(code)


if __name__ == "__main__":
    main()
