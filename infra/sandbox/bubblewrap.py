"""Sandboxes by bubblewrap: namespaces of the running kernel around the host's own userland, no daemon, no image.

Invariant: inside there is no network but a loopback of its own, nothing of the host's files but /usr and the few
files of /etc that programs need, and nothing writable but /workspace, /home/agent, /tmp and what the description
binds as writable. The one way out is the model gateway's unix socket, when the description gives one: a relay
inside offers it on the loopback.

``command`` only builds the line: it starts nothing and reads nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Final

import psutil

from infra.sandbox.spec import (
    HOME,
    PROXY_FOLDER,
    PROXY_PORT,
    USER_ID,
    WORKSPACE,
    SandboxSpec,
    SandboxStuck,
    SandboxUnavailable,
)

ETC: Final = (
    "/etc/alternatives",
    "/etc/group",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/ssl",
)

ROOT_FOLDERS: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")

RELAY: Final = f"""\
socat -b 65536 TCP-LISTEN:{PROXY_PORT},bind=127.0.0.1,reuseaddr,fork,backlog=64 UNIX-CONNECT:"$1" &
shift
listening() {{
  while read -r _ address _; do
    case $address in *:{PROXY_PORT:04X}) return 0;; esac
  done < /proc/net/tcp
  return 1
}}
tries=0
until listening; do
  tries=$((tries + 1))
  if [ $tries -gt 1000 ]; then echo "the relay to the model gateway does not listen" >&2; exit 125; fi
  sleep 0.01
done
"""
"""Starts the relay and waits until it listens; reading /proc costs no process."""

RUN: Final = """\
"$@"
exit $?
"""
"""The sandbox's first process, in place of bubblewrap's own, for whose end bubblewrap does not wait.

So once the command line has ended nothing of the sandbox is left, and whoever waited for it is told the processor
time of everything in it."""


class Bubblewrap:
    name = "bubblewrap"

    def __init__(self) -> None:
        self._base = ["--ro-bind", "/usr", "/usr"]
        for folder in map(Path, ROOT_FOLDERS):
            if folder.is_symlink():
                self._base += ["--symlink", str(folder.readlink()), str(folder)]
            elif folder.is_dir():
                self._base += ["--ro-bind", str(folder), str(folder)]
        for file in ETC:
            self._base += ["--ro-bind-try", file, file]
        self._base += ["--proc", "/proc", "--dev", "/dev"]
        self._program = shutil.which("bwrap") or "/usr/bin/bwrap"

    def check(self) -> None:
        """Run an empty sandbox once. Raises SandboxUnavailable."""
        for program, package in (("bwrap", "bubblewrap"), ("socat", "socat"), ("prlimit", "util-linux")):
            if shutil.which(program) is None:
                raise SandboxUnavailable(f"{program} is missing: install the package {package} (apt install {package})")
        trial = [*self._isolation(), *self._base, "--", "/bin/sh", "-c", ":"]
        done = subprocess.run(trial, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            raise SandboxUnavailable(
                f"bubblewrap cannot make a sandbox here: {done.stderr.strip()}. Unprivileged user namespaces must be "
                "allowed (sysctl kernel.unprivileged_userns_clone=1, or kernel.apparmor_restrict_unprivileged_userns=0 "
                "on Ubuntu; in a container: seccomp and AppArmor profiles that let it unshare)"
            )

    def command(self, spec: SandboxSpec) -> list[str]:
        limits = spec.limits
        line = [*self._isolation(), *self._base]
        line += ["--size", str(limits.tmp_mb << 20), "--tmpfs", "/tmp", "--bind", str(spec.workspace), WORKSPACE]
        line += ["--symlink", WORKSPACE, "/app"]  # where tasks written for Harbor's images look
        line += ["--dir", HOME] if spec.home is None else ["--bind", str(spec.home), HOME]
        for bind in spec.binds:
            line += ["--bind" if bind.writable else "--ro-bind", str(bind.source), bind.target]
        if spec.proxy_socket is not None:
            line += ["--ro-bind", str(spec.proxy_socket.parent), PROXY_FOLDER]
        if spec.status_fd is not None:
            line += ["--json-status-fd", str(spec.status_fd)]
        line += ["--chdir", WORKSPACE, "--", "/usr/bin/prlimit", "--core=0", f"--fsize={limits.file_mb << 20}"]
        line += [f"--nproc={limits.processes}"]  # set inside, so that it counts this sandbox's processes only
        if limits.address_space_mb is not None:
            line += [f"--as={limits.address_space_mb << 20}"]
        if spec.proxy_socket is None:
            line += ["/bin/sh", "-c", RUN, _mark(spec.workspace)]
        else:
            line += ["/bin/sh", "-c", RELAY + RUN, _mark(spec.workspace), f"{PROXY_FOLDER}/{spec.proxy_socket.name}"]
        return [*line, *spec.argv]

    def remains(self, workspace: Path) -> list[int]:
        # the command lines of the monitor and of the first process inside both name the workspace, and the kernel lets
        # go of the latter only when everything in the sandbox is gone
        lines = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
        bound, mark = ("--bind", str(workspace)), _mark(workspace)
        return [pid for pid, line in lines.items() if mark in line or bound in pairwise(line)]

    def clear(self, workspace: Path, deadline_s: float = 15.0) -> None:
        deadline = time.monotonic() + deadline_s
        while remains := self.remains(workspace):
            if time.monotonic() > deadline:
                raise SandboxStuck(f"processes {remains} of a sandbox on {workspace} cannot be killed")
            for pid in remains:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _isolation(self) -> list[str]:
        line = [self._program, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1"]
        return [*line, "--hostname", "sandbox", "--uid", str(USER_ID), "--gid", str(USER_ID)]


def _mark(workspace: Path) -> str:
    return f"sandbox:{workspace}"
