"""What a program in a sandbox can and cannot do, tried by real programs in real sandboxes."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_chat_server import ScriptedChatServer

from infra.sandbox.bubblewrap import Bubblewrap
from infra.sandbox.spec import BASE_ENVIRONMENT, Bind, SandboxLimits, SandboxSpec

pytestmark = pytest.mark.stack


@pytest.fixture
def inside(folder: Path, sandbox: Bubblewrap) -> Callable[..., subprocess.CompletedProcess[str]]:
    workspace = folder / "workspace"
    workspace.mkdir()

    def run(script: str, **more: object) -> subprocess.CompletedProcess[str]:
        spec = SandboxSpec.model_validate({"argv": ("/bin/sh", "-c", script), "workspace": workspace, **more})
        line = sandbox.command(spec)
        return subprocess.run(line, env=BASE_ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False)

    return run


def test_the_machine_can_make_sandboxes(sandbox: Bubblewrap) -> None:
    sandbox.check()


def test_the_command_line_is_pure_and_keeps_the_environment_to_itself(folder: Path) -> None:
    spec = SandboxSpec(argv=("/bin/true",), workspace=folder / "absent", proxy_socket=folder / "no" / "proxy.sock")
    line = Bubblewrap().command(spec)
    assert line == Bubblewrap().command(spec)
    assert {"--unshare-all", "--die-with-parent", "--new-session"} <= set(line)
    assert "--share-net" not in line and "--setenv" not in line
    assert line[line.index(str(folder / "absent")) - 1] == "--bind"
    assert line[-1] == "/bin/true"


def test_only_the_loopback_exists_and_nothing_outside_answers(
    inside: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = inside("tail -n +3 /proc/net/dev; tail -n +2 /proc/net/route; socat - TCP:1.1.1.1:53,connect-timeout=2")
    assert [line.split(":")[0].strip() for line in done.stdout.splitlines()] == ["lo"]
    assert "unreachable" in done.stderr.lower()


def test_the_hosts_loopback_is_not_reachable(inside: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "refused" in inside(f"socat - TCP:127.0.0.1:{port}").stderr.lower()


def test_the_gateway_is_the_one_way_out(
    inside: Callable[..., subprocess.CompletedProcess[str]], chat: Callable[..., ScriptedChatServer]
) -> None:
    server = chat()
    post = "POST /v1/chat/completions HTTP/1.0\\r\\nAuthorization: Bearer k\\r\\nContent-Length: 13\\r\\n\\r\\n"
    done = inside(
        f'printf \'{post}{{"model":"m"}}\' | socat -t 5 - TCP:127.0.0.1:8080; ls /run/gyre',
        proxy_socket=server.socket,
    )
    assert "done." in done.stdout and "proxy.sock" in done.stdout
    assert server.keys == ["Bearer k"]


def test_nothing_of_the_host_is_writable_and_little_is_readable(
    inside: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    done = inside(
        "touch /usr/x /etc/x; cat /etc/shadow; ls /root /home /work /var; echo ok > /workspace/a; echo ok > /tmp/b;"
        " echo ok > $HOME/c; cat /app/a; env | sort; id -u"
    )
    assert "Read-only file system" in done.stderr and "/etc/shadow" in done.stderr and "/root" in done.stderr
    assert (folder / "workspace" / "a").read_text() == "ok\n"
    shown = done.stdout.splitlines()
    assert shown[-1] == "1000"
    assert [line.split("=")[0] for line in shown if "=" in line] == ["HOME", "LANG", "PATH", "PWD", "TERM", "USER"]


def test_an_extra_bind_is_read_only_unless_it_says_otherwise(
    inside: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    for name in ("given", "lent"):
        (folder / name).mkdir()
    binds = (
        Bind(source=folder / "given", target="/given", writable=True),
        Bind(source=folder / "lent", target="/gyre/lent"),
    )
    assert "Read-only" in inside("touch /given/x; touch /gyre/lent/x", binds=binds).stderr
    assert (folder / "given" / "x").exists() and not (folder / "lent" / "x").exists()


def test_memory_and_file_size_are_limited(
    inside: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    limits = SandboxLimits(address_space_mb=256, file_mb=1, tmp_mb=1)
    done = inside(
        "python3 -I -S -c 'bytearray(400 << 20)'; head -c 3000000 /dev/zero > big; head -c 3000000 /dev/zero > /tmp/b",
        limits=limits,
    )
    assert "MemoryError" in done.stderr
    assert (folder / "workspace" / "big").stat().st_size == 1 << 20


def test_the_exit_status_is_the_programs_and_nothing_outlives_it(
    inside: Callable[..., subprocess.CompletedProcess[str]], folder: Path, sandbox: Bubblewrap
) -> None:
    assert inside("sleep 60 & exit 7").returncode == 7
    assert inside("kill -9 $$").returncode == 137
    assert sandbox.remains(folder / "workspace") == []
