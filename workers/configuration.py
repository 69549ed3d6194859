"""Read a run configuration from TOML, with errors that say what, where and how to mend it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import ValidationError

from activities.runs import ConfigurationError, check_config
from infra.settings import Settings
from workers.errors import UsageError
from workflows.contracts.configuration import RunConfig


def read_config(path: Path) -> RunConfig:
    """The configuration in ``path``; its folders are relative to the file. Raises UsageError."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from None
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{path}: {describe(error)}") from None
    base = path.absolute().parent
    tasks = config.tasks.model_copy(
        update={
            "train": str(base / config.tasks.train),
            "heldout": str(base / config.tasks.heldout) if config.tasks.heldout else "",
        }
    )
    return config.model_copy(update={"policy": str(base / config.policy), "tasks": tasks})


def describe(error: ValidationError) -> str:
    """Every fault of a pydantic model on one line: key, what is wrong."""
    faults = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        message = "unknown key" if fault["type"] == "extra_forbidden" else fault["msg"].removeprefix("Value error, ")
        faults.append(f"{key}: {message}" if key else message)
    return "; ".join(faults)


def check(config: RunConfig, settings: Settings) -> None:
    """Refuse, before anything starts, what the stack cannot do. Raises UsageError."""
    try:
        check_config(config, settings)
    except ConfigurationError as error:
        raise UsageError(str(error)) from None
    if Path(config.policy).resolve() != settings.policy.resolve():
        raise UsageError(
            f"policy: the stack serves {settings.policy}, the run wants {config.policy}: "
            "set GYRE_POLICY to the run's policy and start the stack again"
        )
    if config.sampling.context_limit > settings.context_length:
        raise UsageError(
            f"sampling.context_limit: {config.sampling.context_limit} tokens, but the engines take "
            f"{settings.context_length}: lower it, or set GYRE_CONTEXT_LENGTH"
        )
