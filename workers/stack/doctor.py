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
from pydantic import BaseModel
from redis.exceptions import RedisError

from infra.settings import Settings
from infra.state.blobs import BlobStore
from infra.state.redis import redis_client
from infra.state.routes import all_routes
from infra.temporal import TemporalUnreachable, connect
from workers.stack.local import missing_parts, read_state
from workers.stack.processes import local_stack
from workers.stack.supervisor import is_ready
from workflows import names

PINNED = {"sglang": "0.5.23", "megatron-core": "0.16.1", "mooncake-transfer-engine-non-cuda": "0.3.13.post1"}


class Finding(BaseModel):
    part: str
    ok: bool
    detail: str
    mend: str = ""


async def examine(settings: Settings) -> list[Finding]:
    """Every check, in the order of the stack. A check that fails by accident is itself a finding."""
    checks: list[tuple[str, Callable[[Settings], Awaitable[Finding]]]] = [
        ("python packages", _packages),
        ("system parts", _parts),
        ("mooncake", _mooncake),
        ("sandbox", _sandbox),
        ("temporal", _temporal),
        ("redis", _redis),
        ("blob store", _blobs),
        ("kv store", _kv_store),
        ("processes", _processes),
        ("routes", _routes),
        ("listeners", _listeners),
    ]
    findings = []
    for part, check in checks:
        try:
            findings.append(await asyncio.wait_for(check(settings), 60))
        except Exception as error:
            findings.append(
                Finding(part=part, ok=False, detail=f"{type(error).__name__}: {error}", mend="see the error")
            )
    return findings


async def _packages(settings: Settings) -> Finding:
    wrong = []
    for package, version in PINNED.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found != version:
            wrong.append(f"{package} {found}, not {version}")
    detail = "; ".join(wrong) or f"Python {sys.version.split()[0]}, " + ", ".join(f"{k} {v}" for k, v in PINNED.items())
    return Finding(part="python packages", ok=not wrong, detail=detail, mend="make install" if wrong else "")


async def _parts(settings: Settings) -> Finding:
    missing = missing_parts(settings)
    return Finding(part="system parts", ok=not missing, detail="; ".join(missing) or "all there", mend="as it says")


async def _mooncake(settings: Settings) -> Finding:
    code = "from mooncake.engine import TransferEngine; e = TransferEngine(); import sys; "
    code += "sys.exit(e.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', ''))"
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )
    detail = "starts; NB its ports listen on every interface without authentication: keep them behind a firewall"
    if done.returncode:
        detail = (done.stderr.strip().splitlines() or ["does not start"])[-1]
    return Finding(
        part="mooncake", ok=not done.returncode, detail=detail, mend="apt-get install libibverbs1 libnuma1 libcurl4"
    )


async def _sandbox(settings: Settings) -> Finding:
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--die-with-parent", "/bin/true"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20, check=False)
    detail = done.stderr.strip() or "bubblewrap starts without privileges"
    mend = "allow unprivileged user namespaces (kernel.unprivileged_userns_clone=1)"
    return Finding(part="sandbox", ok=not done.returncode, detail=detail, mend=mend)


async def _temporal(settings: Settings) -> Finding:
    try:
        client = await connect(settings)
    except TemporalUnreachable as error:
        return Finding(part="temporal", ok=False, detail=str(error), mend="gyre up")
    handle = client.get_workflow_handle(names.scheduler_id(settings.pool))
    status = (await handle.describe()).status
    detail = f"{settings.temporal} answers; scheduler is {status.name if status else 'unknown'}"
    return Finding(part="temporal", ok=True, detail=detail)


async def _redis(settings: Settings) -> Finding:
    redis = redis_client(settings.redis)
    try:
        info = await redis.info("persistence")
        policy = (await redis.config_get("maxmemory-policy"))["maxmemory-policy"]
    except (RedisError, OSError) as error:
        return Finding(
            part="redis", ok=False, detail=f"{settings.redis}: {error}", mend="gyre up, or set GYRE_REDIS_URL"
        )
    finally:
        await redis.aclose()
    faults = [] if int(info["aof_enabled"]) else ["the append-only file is off: records die with the server"]
    if policy not in ("noeviction", b"noeviction"):
        faults.append(f"maxmemory-policy is {policy}: records may be evicted")
    mend = "CONFIG SET appendonly yes; CONFIG SET maxmemory-policy noeviction" if faults else ""
    return Finding(part="redis", ok=not faults, detail="; ".join(faults) or f"{settings.redis}, AOF on", mend=mend)


async def _blobs(settings: Settings) -> Finding:
    store = BlobStore(settings.blobs)
    ref = store.put(b"gyre doctor")
    ok = store.get(ref) == b"gyre doctor"
    free = shutil.disk_usage(settings.root).free / 2**30 if Path(settings.blobs).exists() else 0
    detail = f"{settings.blobs} is writable" + (f", {free:.0f} GiB free" if free else "")
    return Finding(part="blob store", ok=ok, detail=detail, mend="set GYRE_BLOB_URL")


async def _kv_store(settings: Settings) -> Finding:
    store = settings.kv_store
    if store is None:
        return Finding(part="kv store", ok=True, detail="none: a call that moves has its prefix computed again")
    mend = "gyre up" if settings.embedded_kv_store else "start its master there, or mend GYRE_KV_STORE_ADDRESS"
    try:
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{store.http}/health") as answer:
            answer.raise_for_status()
    except (aiohttp.ClientError, OSError) as error:
        detail = f"the master of {store.master} does not answer at {store.http}: {error or type(error).__name__}"
        return Finding(part="kv store", ok=False, detail=detail, mend=mend)
    return Finding(part="kv store", ok=True, detail=f"{store.master} answers")


async def _processes(settings: Settings) -> Finding:
    state = read_state(settings)
    if state is None:
        return Finding(part="processes", ok=False, detail="the local stack is not running", mend="gyre up")
    silent = [spec.name for spec in local_stack(settings) if not await is_ready(spec)]
    restarted = {n: p["restarts"] for n, p in state["processes"].items() if p["restarts"]}
    detail = f"{len(state['processes'])} processes answer" if not silent else f"no answer from {', '.join(silent)}"
    detail += f"; restarted: {restarted}" if restarted else ""
    return Finding(part="processes", ok=not silent, detail=detail, mend=f"see {settings.logs}" if silent else "")


async def _routes(settings: Settings) -> Finding:
    redis = redis_client(settings.redis)
    try:
        routes = await all_routes(redis)
    finally:
        await redis.aclose()
    detail = ", ".join(f"{cell}: {'open' if r.open else 'closed'} v{r.version}" for cell, r in routes.items())
    return Finding(part="routes", ok=True, detail=detail or "no cell has served yet")


async def _listeners(settings: Settings) -> Finding:
    """Addresses on which processes of the stack listen beyond loopback (Linux /proc/net)."""
    import psutil

    state = read_state(settings)
    if state is None:
        return Finding(part="listeners", ok=True, detail="the local stack is not running")
    wide: dict[str, list[int]] = {}
    for name, process in state["processes"].items():
        tree = psutil.Process(process["pid"])
        for member in [tree, *tree.children(recursive=True)]:
            for connection in member.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.ip not in ("127.0.0.1", "::1"):
                    wide.setdefault(name, []).append(connection.laddr.port)
    unexpected = [name for name in wide if not name.endswith("-replica")]
    detail = "; ".join(f"{name} on every interface: {sorted(ports)}" for name, ports in wide.items())
    if wide and not unexpected:
        detail += " (Mooncake's engine binds every interface whatever it is told)"
    mend = "a firewall, or a network namespace" if wide else ""
    return Finding(part="listeners", ok=not unexpected, detail=detail or "loopback only", mend=mend)
