"""The options of `gyre bench`. What is measured is imported when it is run."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer
from rich.console import Console


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
    from workers.bench.proxy import CACHE, SMALL, Plan, measure, print_bench

    sizes = SMALL if small else {"turns": turns, "tokens": tokens, "episodes": episodes}
    result = await measure(Plan.model_validate({**sizes, "dialect": dialect}), CACHE)
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        print_bench(result, Console(soft_wrap=True))
    if not result["holds"]:
        raise typer.Exit(1)


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
    from workers.bench import trajectory

    if full or small:
        episodes, group_size = (trajectory.FULL, 16) if full else (trajectory.SMALL, trajectory.SMALL)
    plan = trajectory.Plan(episodes=episodes, group_size=group_size, tokens=tokens, token_budget=budget)
    result = {"processor": await asyncio.to_thread(trajectory.measure, plan)}
    lines = [trajectory.describe(result["processor"])]
    if training:
        from workers.bench import training as passes  # torch: only now

        sizes = passes.Plan.model_validate(passes.SMALL if small else {})
        result["training"] = await asyncio.to_thread(passes.measure, sizes)
        lines.append(trajectory.describe_training(result["training"]))
    holds = all(part["holds"] for part in result.values())
    if as_json:
        print(json.dumps({**result, "holds": holds}, indent=1))
    else:
        Console(soft_wrap=True).print("\n".join(lines), highlight=False)
    if not holds:
        raise typer.Exit(1)
