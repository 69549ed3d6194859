"""Workers speak to replicas without loading torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infra.megatron.protocol import ReplicaClient, ReplicaUnavailable

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_protocol_imports_neither_torch_nor_megatron() -> None:
    code = "import infra.megatron.protocol, sys; sys.exit(bool({'torch', 'megatron', 'mooncake'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60, check=False).returncode == 0


async def test_a_replica_that_was_never_started_is_unavailable(tmp_path: Path) -> None:
    async with ReplicaClient(tmp_path / "cell-7" / "replica.sock") as client:
        with pytest.raises(ReplicaUnavailable, match="cell-7 /status"):
            await client.status()
