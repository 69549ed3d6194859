"""The processes of the local stack: their command lines, environments, order and readiness.

Pure description; `workers.stack.supervisor` starts and supervises them. Everything listens on ``settings.host`` only,
except the data ports of Mooncake (in each replica; with a KV store in each engine and its segment), which bind every
interface whatever they are told.
"""

from __future__ import annotations

import hashlib
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.kv_store.commands import master_command, segment_command
from infra.settings import Settings
from infra.sglang.launch import engine_command, engine_environment
from workers.stack.valkey import valkey_command

WORKER_ROLES = ("control", "harness", "grade", "trajectory")


@dataclass(frozen=True)
class ProcessSpec:
    name: str
    command: Callable[[], list[str]]
    """Asked anew for every start, as is its environment."""
    environment: Callable[[], Mapping[str, str]] = lambda: dict(os.environ)
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
    cell: str = ""
    """The cell whose compute it is; empty for none."""


def local_stack(settings: Settings) -> list[ProcessSpec]:
    """Every process of the stack that ``settings`` describe, in an order that respects ``after``."""
    servers = [_temporal(settings)] if settings.embedded_temporal else []
    servers += [_valkey(settings)] if settings.embedded_redis else []
    base = tuple(server.name for server in servers)
    specs = servers + (_kv_store(settings) if settings.embedded_kv_store else [])
    policy, host = str(settings.policy.absolute()), settings.host
    health = f"http://{host}:{settings.proxy_port}/healthz"
    specs.append(_own(settings, "proxy", ["proxy.main", "--policy", policy], http=health, after=base))
    for role in WORKER_ROLES:
        specs.append(_worker(settings, role, ["--role", role], base))
    for cell in settings.cell_names():
        replica = ["infra.megatron.server", "--cell", cell, "--policy", policy]
        of_cell = (
            _engine(settings, cell),
            _own(settings, f"{cell}-replica", replica, socket=settings.replica_socket(cell), after=base),
            _worker(settings, f"{cell}-worker", ["--role", "cell", "--cell", cell], base),
        )
        specs += [replace(spec, cell=cell) for spec in of_cell]
    return specs


def quota_name(settings: Settings, cell: str = "") -> str:
    """Name of the control group of a cell of this home; without a cell what all their names begin with."""
    home = hashlib.sha256(str(settings.root).encode()).hexdigest()[:12]
    return f"gyre-{home}-{cell}"


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
    port, folder = settings.port_base + 10, settings.root / "valkey"
    command = valkey_command(folder, ["--bind", settings.host, "--port", str(port)])
    return ProcessSpec("valkey", lambda: command, listens=(settings.host, port))


def _kv_store(settings: Settings) -> list[ProcessSpec]:
    """Nobody waits for it: engines use it as soon as, and for as long as, it is there."""
    store, socket = settings.kv_store, settings.root / "kv_store" / "segment.sock"
    assert store is not None
    port = int(store.master.rsplit(":", 1)[1])
    master = ProcessSpec(
        "kv-store-master", lambda: master_command(settings.host, port, port + 1), http=f"{store.http}/health"
    )
    segment = ProcessSpec(
        "kv-store-segment",
        lambda: segment_command(settings.host, store.master, settings.kv_store_mb, socket),
        lambda: child_environment(settings),
        socket=socket,
        after=(master.name,),
    )
    return [master, segment]


def _own(settings: Settings, name: str, module: list[str], **ready: Any) -> ProcessSpec:
    """A process of gyre's own: a module with its arguments."""
    return ProcessSpec(name, lambda: [sys.executable, "-m", *module], lambda: child_environment(settings), **ready)


def _worker(settings: Settings, name: str, arguments: list[str], after: tuple[str, ...]) -> ProcessSpec:
    socket = settings.root / "workers" / f"{name}.sock"
    return _own(settings, name, ["workers.worker", *arguments], socket=socket, after=after)


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
            kv_store=settings.kv_store,
        )

    return ProcessSpec(
        f"{cell}-engine",
        command,
        lambda: engine_environment(scratch),
        http=f"http://{settings.host}:{port}/ready",
    )
