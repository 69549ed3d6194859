"""The options of `gyre bench`. What is measured is imported when it is run."""

from __future__ import annotations

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
