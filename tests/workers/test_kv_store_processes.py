"""The local stack with a KV store, as a description: who is started, who waits for whom, and what engines are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from infra.settings import Settings
from workers.stack.processes import ProcessSpec, local_stack

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
BACKEND = "--hicache-storage-backend-extra-config"


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def stack(policy: Path, **settings: object) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in local_stack(Settings(policy=policy, home=policy / "home", **settings))}


def test_a_stack_without_a_store_starts_none_and_its_engines_know_of_none(policy: Path) -> None:
    specs = stack(policy, kv_store_mb=0)
    assert not [name for name in specs if name.startswith("kv-store")]
    assert not [part for part in specs["cell-0-engine"].command() if "hi" in part and "cache" in part]


def test_a_store_is_started_on_loopback_and_nobody_waits_for_it(policy: Path) -> None:
    specs = stack(policy, kv_store_mb=64, port_base=18000)
    master, segment = specs["kv-store-master"], specs["kv-store-segment"]
    assert {"--rpc_address=127.0.0.1", "--rpc_port=18030", "--metrics_host=127.0.0.1"} <= set(master.command())
    assert segment.after == (master.name,) and "64" in segment.command()
    assert not [spec.name for spec in specs.values() if segment.name in spec.after]
    engine = specs["cell-0-engine"].command()
    told = json.loads(engine[engine.index(BACKEND) + 1])
    assert (told["master"], told["http"]) == ("127.0.0.1:18030", "http://127.0.0.1:18031")
    other = specs["cell-1-engine"].command()
    assert json.loads(other[other.index(BACKEND) + 1]) == told, "cells share their KV"


def test_an_external_store_is_used_and_none_is_started(policy: Path) -> None:
    specs = stack(policy, kv_store_address="store.example:7000")
    assert not [name for name in specs if name.startswith("kv-store")]
    engine = specs["cell-0-engine"].command()
    told = json.loads(engine[engine.index(BACKEND) + 1])
    assert (told["master"], told["http"]) == ("store.example:7000", "http://store.example:7001")
    with pytest.raises(ValidationError):
        Settings(kv_store_address="no port")
