"""`gyre doctor`: look at every component and say how to mend what is wrong. Changes nothing."""

from __future__ import annotations

import asyncio
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import psutil
from pydantic import BaseModel
from redis.exceptions import RedisError

from infra.settings import Settings
from infra.state.blobs import BlobStore
from infra.state.redis import redis_client
from infra.state.routes import all_routes
from infra.temporal import TemporalUnreachable, connect
from workers.stack.local import missing_parts, read_state
from workers.stack.memory import process_tree
from workers.stack.processes import local_stack
from workers.stack.supervisor import is_ready
from workflows import names

PINNED = {"sglang": "0.5.23", "megatron-core": "0.16.1", "mooncake-transfer-engine-non-cuda": "0.3.13.post1"}


class Diagnosis(BaseModel):
    part: str
    ok: bool
    detail: str
    mend: str = ""


Symptoms = tuple[bool, str, str]
"""Whether the part is well, what was seen, and how to mend it."""


async def examine(settings: Settings) -> list[Diagnosis]:
    """Every check, in the order of the stack. A check that fails by accident is itself a finding."""
    diagnoses = []
    for part, check in CHECKS.items():
        try:
            ok, detail, mend = await asyncio.wait_for(check(settings), 60)
        except Exception as error:
            ok, detail, mend = False, f"{type(error).__name__}: {error}", "see the error"
        diagnoses.append(Diagnosis(part=part, ok=ok, detail=detail, mend=mend))
    return diagnoses


async def _packages(settings: Settings) -> Symptoms:
    wrong = []
    for package, version in PINNED.items():
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed = "missing"
        if installed != version:
            wrong.append(f"{package} {installed}, not {version}")
    pinned = ", ".join(f"{package} {version}" for package, version in PINNED.items())
    detail = "; ".join(wrong) or f"Python {sys.version.split()[0]}, {pinned}"
    return not wrong, detail, "make install" if wrong else ""


async def _parts(settings: Settings) -> Symptoms:
    missing = missing_parts(settings)
    return not missing, "; ".join(missing) or "all there", "as it says"


async def _mooncake(settings: Settings) -> Symptoms:
    code = "from mooncake.engine import TransferEngine; e = TransferEngine(); import sys; "
    code += "sys.exit(e.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', ''))"
    done = await _run([sys.executable, "-c", code], 50)
    detail = "starts; NB its ports listen on every interface without authentication: keep them behind a firewall"
    if done.returncode:
        detail = (done.stderr.strip().splitlines() or ["does not start"])[-1]
    return not done.returncode, detail, "apt-get install libibverbs1 libnuma1 libcurl4"


async def _sandbox(settings: Settings) -> Symptoms:
    done = await _run(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--die-with-parent", "/bin/true"], 20)
    detail = done.stderr.strip() or "bubblewrap starts without privileges"
    return not done.returncode, detail, "allow unprivileged user namespaces (kernel.unprivileged_userns_clone=1)"


async def _run(command: list[str], within_s: float) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=within_s, check=False
    )


async def _temporal(settings: Settings) -> Symptoms:
    try:
        client = await connect(settings)
    except TemporalUnreachable as error:
        return False, str(error), "gyre up"
    status = (await client.get_workflow_handle(names.scheduler_id(settings.pool)).describe()).status
    return True, f"{settings.temporal} answers; scheduler is {status.name if status else 'unknown'}", ""


async def _redis(settings: Settings) -> Symptoms:
    try:
        async with redis_client(settings.redis) as redis:
            info = await redis.info("persistence")
            policy = (await redis.config_get("maxmemory-policy"))["maxmemory-policy"]
    except (RedisError, OSError) as error:
        return False, f"{settings.redis}: {error}", "gyre up, or set GYRE_REDIS_URL"
    faults = [] if int(info["aof_enabled"]) else ["the append-only file is off: records die with the server"]
    if policy not in ("noeviction", b"noeviction"):
        faults.append(f"maxmemory-policy is {policy}: records may be evicted")
    mend = "CONFIG SET appendonly yes; CONFIG SET maxmemory-policy noeviction" if faults else ""
    return not faults, "; ".join(faults) or f"{settings.redis}, AOF on", mend


async def _blobs(settings: Settings) -> Symptoms:
    store = BlobStore(settings.blobs)
    ref = store.put(b"gyre doctor")
    free = shutil.disk_usage(settings.root).free / 2**30 if Path(settings.blobs).exists() else 0
    detail = f"{settings.blobs} is writable" + (f", {free:.0f} GiB free" if free else "")
    return store.get(ref) == b"gyre doctor", detail, "set GYRE_BLOB_URL"


async def _kv_store(settings: Settings) -> Symptoms:
    store = settings.kv_store
    if store is None:
        return True, "none: a call that moves has its prefix computed again", ""
    try:
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{store.http}/health") as answer:
            answer.raise_for_status()
    except (aiohttp.ClientError, OSError) as error:
        detail = f"the master of {store.master} does not answer at {store.http}: {error or type(error).__name__}"
        mend = "gyre up" if settings.embedded_kv_store else "start its master there, or mend GYRE_KV_STORE_ADDRESS"
        return False, detail, mend
    return True, f"{store.master} answers", ""


async def _processes(settings: Settings) -> Symptoms:
    state = read_state(settings)
    if state is None:
        return False, "the local stack is not running", "gyre up"
    silent = [spec.name for spec in local_stack(settings) if not await is_ready(spec)]
    restarted = {name: process["restarts"] for name, process in state["processes"].items() if process["restarts"]}
    detail = f"{len(state['processes'])} processes answer" if not silent else f"no answer from {', '.join(silent)}"
    detail += f"; restarted: {restarted}" if restarted else ""
    return not silent, detail, f"see {settings.logs}" if silent else ""


async def _routes(settings: Settings) -> Symptoms:
    async with redis_client(settings.redis) as redis:
        routes = await all_routes(redis)
    detail = ", ".join(f"{cell}: {'open' if r.open else 'closed'} v{r.version}" for cell, r in routes.items())
    return True, detail or "no cell has served yet", ""


async def _listeners(settings: Settings) -> Symptoms:
    """Addresses on which processes of the stack listen beyond loopback."""
    state = read_state(settings)
    if state is None:
        return True, "the local stack is not running", ""
    wide: dict[str, list[int]] = {}
    for name, process in state["processes"].items():
        for member in process_tree(process["pid"]):
            for connection in member.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.ip not in ("127.0.0.1", "::1"):
                    wide.setdefault(name, []).append(connection.laddr.port)
    unexpected = [name for name in wide if not name.endswith("-replica")]
    detail = "; ".join(f"{name} on every interface: {sorted(ports)}" for name, ports in wide.items())
    if wide and not unexpected:
        detail += " (Mooncake's engine binds every interface whatever it is told)"
    return not unexpected, detail or "loopback only", "a firewall, or a network namespace" if wide else ""


CHECKS: dict[str, Callable[[Settings], Awaitable[Symptoms]]] = {
    "python packages": _packages,
    "system parts": _parts,
    "mooncake": _mooncake,
    "sandbox": _sandbox,
    "temporal": _temporal,
    "redis": _redis,
    "blob store": _blobs,
    "kv store": _kv_store,
    "processes": _processes,
    "routes": _routes,
    "listeners": _listeners,
}
