"""The proxy as a process: both sockets, a clean stop, a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
from proxy_parts import World, until, write_tokenizer

from infra.state import keys


@pytest.mark.stack
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_proxy_process_serves_a_port_and_a_socket(
    world: World, valkey_url: str, tmp_path: Path, end: signal.Signals
) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        base = int(probe.getsockname()[1])
    environment = os.environ | {
        "GYRE_HOME": str(tmp_path / "home"),
        "GYRE_PORT_BASE": str(base - 20),
        "GYRE_REDIS_URL": valkey_url,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "proxy.main", "--policy", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(*command, env=environment, cwd=Path(__file__).parents[2])
    path = tmp_path / "home" / "proxy" / "proxy.sock"
    try:
        await until(path.exists, "socket")
        assert path.stat().st_mode & 0o777 == 0o666
        (proxy_id,) = await until(lambda: world.redis.smembers(keys.PROXIES), "registered")
        async with (
            aiohttp.ClientSession() as tcp,
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as unix,
        ):
            for session, url in ((tcp, f"http://127.0.0.1:{base}"), (unix, "http://proxy")):
                async with session.get(f"{url}/healthz") as response:
                    assert (await response.json())["proxy"] == proxy_id.decode()
            body = {"messages": [{"role": "user", "content": "go"}]}
            headers = {"x-api-key": await world.key()}
            held = asyncio.create_task(unix.post("http://proxy/v1/chat/completions", json=body, headers=headers))
            await until(lambda: world.redis.hlen(keys.holding("ep")), "held")
            process.send_signal(end)
            await asyncio.wait_for(process.wait(), 20)
            assert isinstance(
                (await asyncio.gather(held, return_exceptions=True))[0], aiohttp.ClientError | aiohttp.ClientResponse
            )
        lease = keys.proxy_lease(proxy_id.decode())
        if end == signal.SIGTERM:
            assert not await world.redis.exists(lease)
            assert not await world.redis.hlen(keys.holding("ep"))
        else:
            assert 0 < await world.redis.pttl(lease) <= 5000
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
