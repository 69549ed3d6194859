"""One address, several proxy processes: any of them may die, and none outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import pytest
from proxy_parts import ProxyStack, until, write_tokenizer

from infra.state import keys
from proxy.limits import Limits
from proxy.main import BadLimits, read_limits
from proxy.prefork import Family
from tests.processes import CHECKOUT, ProxyProcess, free_port, proxy_process

UNIX = "http://proxy"


async def health(proxy: ProxyProcess, *, unix: bool = False) -> str:
    """Id of the process that answers on a new connection."""
    connector = aiohttp.UnixConnector(str(proxy.path)) if unix else aiohttp.TCPConnector()
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(f"{UNIX if unix else proxy.url}/healthz") as response,
    ):
        return str((await response.json())["proxy"])


def two_processes(valkey_url: str, folder: Path, *arguments: str) -> AbstractAsyncContextManager[ProxyProcess]:
    write_tokenizer(folder / "tokenizer.json")
    return proxy_process(valkey_url, folder, folder / "home", *arguments, processes=2)


async def members(stack: ProxyStack, count: int) -> set[bytes]:
    async def found() -> set[bytes]:
        names = await stack.redis.smembers(keys.PROXIES)
        return names if len(names) == count else set()

    return set(await until(found, f"{count} proxies"))


@pytest.mark.stack
async def test_a_killed_process_is_replaced_while_the_others_serve(
    stack: ProxyStack, valkey_url: str, tmp_path: Path
) -> None:
    async with two_processes(valkey_url, tmp_path, "--limits", '{"lease_s": 1.0}') as proxies:
        first = await members(stack, 2)
        served = {await health(proxies, unix=bool(number % 2)) for number in range(4)}
        assert served <= {name.decode() for name in first}
        victim = proxies.children()[0]
        victim.kill()
        for _ in range(10):
            await health(proxies)
            await health(proxies, unix=True)
        await until(lambda: victim.pid not in [child.pid for child in proxies.children()], "reaped")
        await until(lambda: len(proxies.children()) == 2, "started again")

        async def renewed() -> bool:
            names = await stack.redis.smembers(keys.PROXIES)
            return len(names) == 2 and names != first

        await until(renewed, "the dead one has left the list, the new one is in it")
        before = proxies.children()
        proxies.process.terminate()
        assert await asyncio.wait_for(proxies.process.wait(), 20) == 0
        assert not any(child.is_running() for child in before)
        assert not await stack.redis.smembers(keys.PROXIES)


@pytest.mark.stack
async def test_children_end_with_a_parent_that_was_killed(stack: ProxyStack, valkey_url: str, tmp_path: Path) -> None:
    async with two_processes(valkey_url, tmp_path) as proxies:
        await members(stack, 2)
        children = proxies.children()
        proxies.process.kill()
        await proxies.process.wait()
        await until(lambda: not any(child.is_running() for child in children), "ended")
        assert not await stack.redis.smembers(keys.PROXIES), "they stopped cleanly"


@pytest.mark.stack
async def test_a_proxy_that_cannot_start_ends_instead_of_trying_for_ever(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    environment = os.environ | {"GYRE_HOME": str(tmp_path), "GYRE_PORT_BASE": str(free_port() - 20)}
    command = [sys.executable, "-m", "proxy.main", "--policy", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        *command, "--processes", "2", env=environment, cwd=CHECKOUT, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, complaint = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 2 and b"before it served" in complaint
    finally:
        if process.returncode is None:  # it would go on trying behind a test that has failed
            process.kill()


SERVES_ONCE = "import os, sys; os.write(int(sys.argv[-1]), b'1'); open(sys.argv[1], 'a').write('x'); sys.exit(3)"
NEVER_SERVES = "import sys; sys.exit(3)"


async def test_processes_that_served_are_started_again_though_they_end_at_once(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    family = Family([sys.executable, "-c", SERVES_ONCE, str(lives)], [], 1)
    running = asyncio.create_task(family.run())
    await until(lambda: lives.exists() and lives.stat().st_size > 1, "a second life")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 30) == 0


async def test_processes_that_end_before_they_serve_end_all_with_their_code() -> None:
    family = Family([sys.executable, "-c", NEVER_SERVES], [], 2)
    assert await asyncio.wait_for(family.run(), 30) == 3


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (["--limits", '{"hold": 1}'], {}, "hold: Extra inputs are not permitted; there are answer_s, hold_s"),
        ([], {"GYRE_PROXY_LIMITS": '{"hold_s": "long"}'}, "hold_s: Input should be a valid number"),
        (["--limits", "nowhere.json"], {}, "neither a JSON object nor a file"),
        (["--processes", "0"], {}, "at least 1"),
        ([], {}, "no policy"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said_at_once(
    arguments: list[str], environment: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "proxy.main", "--policy", str(tmp_path / "none"), *arguments]
    ended = subprocess.run(
        command, env=os.environ | environment, cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert complaint in ended.stderr and "Traceback" not in ended.stderr


def test_limits_come_as_json_or_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    file.write_text('{"hold_s": 7}')
    assert read_limits("") == Limits()
    assert read_limits(str(file)) == read_limits('{"hold_s": 7}') == Limits(hold_s=7)
    file.write_text("[1]")
    with pytest.raises(BadLimits):
        read_limits(str(file))
