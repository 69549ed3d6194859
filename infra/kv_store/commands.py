"""The processes that keep KV outside the cells: Mooncake's master, and one that holds the memory.

Pure description. The master's two ports are loopback addresses; the data ports of whoever holds or uses memory bind
every interface, whatever they are told (Mooncake's Transfer Engine).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

LEASE_MS = 5000
"""Within which an object that was looked at isn't evicted: longer than a fetch takes."""


class StoreMissing(RuntimeError):
    """Mooncake isn't installed here."""


def master_command(host: str, port: int, http_port: int) -> list[str]:
    """The process that knows where each page is. Raises StoreMissing."""
    spec = find_spec("mooncake")
    program = Path(spec.origin).parent / "mooncake_master" if spec is not None and spec.origin else None
    if program is None or not program.exists():
        raise StoreMissing("the KV store needs Mooncake's master, which is not installed")
    flags = {
        "rpc_address": host,
        "rpc_port": port,
        "metrics_host": host,
        "metrics_port": http_port,
        "default_kv_lease_ttl": LEASE_MS,
        "rpc_thread_num": 2,
        "enable_metric_reporting": "false",
        "logtostderr": "true",
        "minloglevel": 1,
    }
    return [str(program), *(f"--{name}={value}" for name, value in flags.items())]


def segment_command(host: str, master: str, megabytes: int, socket: Path) -> list[str]:
    """The process that holds the pages, of which ``megabytes`` (1 MB = 2**20 bytes) fit."""
    command = [sys.executable, "-m", "infra.kv_store.segment", "--host", host, "--master", master]
    return [*command, "--megabytes", str(megabytes), "--socket", str(socket)]
