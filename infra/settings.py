"""Where gyre's parts are on this machine: one frozen model, read from the environment (``GYRE_*``).

Everything that differs between the embedded default and a cluster is here. Settings describe the installation;
what a training job does is in its run configuration.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from infra.kv_store.client import StoreAddress


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="GYRE_", frozen=True, extra="forbid")

    home: Path = Path(".gyre")
    """State of the local stack: databases, logs, episodes, blobs."""

    port_base: int = Field(default=17300, ge=1024, le=64000)
    """First of the ports that the local stack opens, all on ``host``."""

    host: str = "127.0.0.1"
    """The address on which everything that gyre opens listens."""

    temporal_address: str = ""
    """``host:port`` of an external Temporal server; empty starts the embedded one."""

    temporal_namespace: str = "default"

    redis_url: str = ""
    """URL of an external Redis or Valkey; empty starts the embedded one."""

    blob_url: str = ""
    """fsspec URL of the blob store; empty is ``home/blobs``."""

    policy: Path = Path(".cache/policy/default")
    """Hugging Face folder of the policy that the stack's engines, replicas and proxy are started for."""

    cells: int = Field(default=2, ge=1, le=64)
    """How many cells the local stack starts."""

    pool: str = "local"
    """Name of the cell pool; its scheduler is ``gyre/scheduler/{pool}``."""

    cell_capacity: int = Field(default=48, ge=1)
    """Episodes that one serving cell holds at once; the watermark policy counts with it."""

    cell_cpu: float = Field(default=0.0, ge=0)
    """Cores that all processes of a cell share (engine, replica, worker) once the stack is ready, by a control group;
    0 for no quota."""

    harnesses: Path = Path(".gyre-harness")
    """Folder with a folder for each installed harness."""

    proxy_processes: int = Field(default=1, ge=1, le=64)
    """Processes with which the proxy serves its port and its socket."""

    proxy_limits: str = ""
    """JSON object: fields of the proxy's limits that differ from its defaults; or the path of a file with one."""

    kv_tokens: int = Field(default=65536, ge=1024)
    """Tokens that the KV pool of one engine holds."""

    context_length: int = Field(default=8192, ge=64)
    """Tokens of the longest request that an engine takes."""

    kv_store_mb: int = Field(default=0, ge=0, le=1 << 20)
    """Memory (1 MB = 2**20 bytes) of the store that keeps KV outside the cells, so that a call that moves to another
    cell takes its prefix along; 0 starts no store: without one, the prefix is computed again."""

    kv_store_address: str = Field(default="", pattern=r"^(?:\S+:\d+)?$")
    """``host:port`` of the Mooncake master of an external KV store, whose HTTP side is at the next port; empty uses the
    embedded one, if there is one."""

    metrics_address: str = Field(default="", pattern=r"^(?:\S+:\d+)?$")
    """``host:port`` on which the control worker answers /metrics in Prometheus' text format: the newest step's gauges
    and the Temporal SDK's own; empty for none."""

    harness_slots: int = Field(default=48, ge=1)
    """Episodes that the harness worker of this machine runs at once."""

    @cached_property
    def root(self) -> Path:
        return self.home.absolute()

    @property
    def embedded_temporal(self) -> bool:
        return not self.temporal_address

    @property
    def embedded_redis(self) -> bool:
        return not self.redis_url

    @property
    def temporal(self) -> str:
        return self.temporal_address or f"{self.host}:{self.port_base}"

    @property
    def temporal_ui(self) -> str:
        return f"http://{self.host}:{self.port_base + 1}"

    @property
    def redis(self) -> str:
        return self.redis_url or f"redis://{self.host}:{self.port_base + 10}/0"

    @property
    def episodes(self) -> Path:
        """Workspaces, logs and exits of the episodes that run on this machine."""
        return self.root / "episodes"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def proxy_port(self) -> int:
        return self.port_base + 20

    @property
    def kv_store(self) -> StoreAddress | None:
        """Where the KV store of the cells is; None without one."""
        if not self.kv_store_mb and not self.kv_store_address:
            return None
        host, port = (self.kv_store_address or f"{self.host}:{self.port_base + 30}").rsplit(":", 1)
        return StoreAddress(f"{host}:{port}", f"http://{host}:{int(port) + 1}")

    @property
    def embedded_kv_store(self) -> bool:
        return bool(self.kv_store_mb) and not self.kv_store_address

    @property
    def proxy_socket(self) -> Path:
        """Unix socket of the proxy: the one way out of a sandbox."""
        return self.root / "proxy" / "proxy.sock"

    @property
    def blobs(self) -> str:
        return self.blob_url or str(self.root / "blobs")

    def cell_names(self) -> list[str]:
        return [f"cell-{i}" for i in range(self.cells)]

    def engine_port(self, cell: str) -> int:
        return self.port_base + 100 + 10 * int(cell.rsplit("-", 1)[1])

    def engine_url(self, cell: str) -> str:
        return f"http://{self.host}:{self.engine_port(cell)}"

    def replica_socket(self, cell: str) -> Path:
        """Unix socket of the cell's training replica."""
        return self.root / "cells" / cell / "replica.sock"
