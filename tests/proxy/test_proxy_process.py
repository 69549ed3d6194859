"""The proxy as a process: both sockets, a clean stop, a kill."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest
from proxy_parts import ProxyStack, until, write_tokenizer

from infra.state import keys
from tests.processes import proxy_process


@pytest.mark.stack
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_proxy_process_serves_a_port_and_a_socket(
    stack: ProxyStack, valkey_url: str, tmp_path: Path, end: signal.Signals
) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    path = tmp_path / "home" / "proxy" / "proxy.sock"
    async with proxy_process(valkey_url, tmp_path, tmp_path / "home") as proxy:
        assert path.stat().st_mode & 0o777 == 0o666
        (proxy_id,) = await stack.redis.smembers(keys.PROXIES)
        async with (
            aiohttp.ClientSession() as tcp,
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as unix,
        ):
            for session, url in ((tcp, proxy.url), (unix, "http://proxy")):
                async with session.get(f"{url}/healthz") as response:
                    assert (await response.json())["proxy"] == proxy_id.decode()
            body = {"messages": [{"role": "user", "content": "go"}]}
            headers = {"x-api-key": await stack.key()}
            held = asyncio.create_task(unix.post("http://proxy/v1/chat/completions", json=body, headers=headers))
            await until(lambda: stack.redis.hlen(keys.holding("ep")), "held")
            proxy.process.send_signal(end)
            await asyncio.wait_for(proxy.process.wait(), 20)
            assert isinstance(
                (await asyncio.gather(held, return_exceptions=True))[0], aiohttp.ClientError | aiohttp.ClientResponse
            )
        lease = keys.proxy_lease(proxy_id.decode())
        if end == signal.SIGTERM:
            assert not await stack.redis.exists(lease)
            assert not await stack.redis.hlen(keys.holding("ep"))
        else:
            assert 0 < await stack.redis.pttl(lease) <= 5000
