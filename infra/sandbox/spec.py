"""What runs in a sandbox, and the interface that every kind of sandbox offers.

A sandbox turns a description into a command line; whoever runs that line owns the process and its time. The
environment is no part of the line, where every user of the host could read the API key in it: it is the
environment with which the line must be run, exactly.

It knows nothing of episodes, tasks or harnesses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from pydantic import BaseModel, ConfigDict, Field

USER_ID: Final = 1000
"""User and group inside the sandbox."""
HOME: Final = "/home/agent"
WORKSPACE: Final = "/workspace"
PROXY_FOLDER: Final = "/run/gyre"
PROXY_PORT: Final = 8080
BASE_URL: Final = f"http://127.0.0.1:{PROXY_PORT}"
"""Where a harness in a sandbox finds the model gateway."""

BASE_ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": HOME,
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}


class SandboxUnavailable(RuntimeError):
    """This machine cannot run the sandbox. The message says how to mend it."""


class SandboxStuck(RuntimeError):
    """Processes of a sandbox don't die."""


class Bind(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Path
    """Absolute path on the host."""
    target: str
    """Absolute path inside."""
    writable: bool = False


class SandboxLimits(BaseModel):
    """Of each process (memory, files) and of all processes of the sandbox together (their number)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address_space_mb: int | None = Field(default=4096, gt=0)
    """MiB of address space of one process; None for programs that reserve far more than they use."""
    processes: int = Field(default=256, gt=0)
    """The kernel exempts root, so it holds only where gyre itself runs as another user."""
    file_mb: int = Field(default=1024, gt=0)
    """MiB of the largest file."""
    tmp_mb: int = Field(default=512, gt=0)
    """MiB of the private /tmp, which is memory."""


class SandboxSpec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    argv: tuple[str, ...] = Field(min_length=1)
    """Program and arguments, as seen inside."""
    workspace: Path
    """Folder on the host that becomes the writable /workspace."""
    home: Path | None = None
    """Folder on the host that becomes the writable /home/agent; None for an empty one that is lost at the end."""
    binds: tuple[Bind, ...] = ()
    proxy_socket: Path | None = None
    """Unix socket of the model gateway, reached inside at ``BASE_URL``; None leaves no way out at all. Its folder is
    what is bound, so that a restarted gateway's new socket is found."""
    limits: SandboxLimits = SandboxLimits()
    status_fd: int | None = None
    """File descriptor on which the sandbox reports, in JSON, that the program was started (``exit-code``)."""


class Sandbox(Protocol):
    name: str

    def check(self) -> None:
        """Raises SandboxUnavailable."""

    def command(self, spec: SandboxSpec) -> list[str]:
        """The command line that runs ``spec.argv`` inside; its exit status is the program's (128 + n for signal n).

        The sandbox dies with the process that starts this line.
        """

    def remains(self, workspace: Path) -> list[int]:
        """Host pids through which sandboxes on this workspace are still alive: empty once nothing of them runs."""

    def clear(self, workspace: Path, deadline_s: float = 15.0) -> None:
        """Kill what remains and wait until it is gone. Raises SandboxStuck."""
