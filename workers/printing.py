"""What every command of `gyre` prints with, and the options that most of them have."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

import typer
from rich.console import Console

console: Final = Console(soft_wrap=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunName = Annotated[str, typer.Argument(help="Name of the run.")]


def show(value: Any) -> None:
    print(json.dumps(value, indent=1, default=str))
