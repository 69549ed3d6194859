"""Real parts that the episodes' tests are made of: a harness that is a shell script."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis import Redis

from infra.harness.harness import Session
from infra.sandbox.spec import Bind
from workers.stack.valkey import Valkey


class EpisodesValkey(Valkey):
    """With a client that outlives its restarts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.client = Redis.from_url(self.url, decode_responses=True)


class ShellHarness:
    """A harness that is a shell script, so that a test says what its harness does; ``resume`` is another one."""

    name = "shell"
    version = ""
    address_space_mb: int | None = 512
    patience_s = 600.0
    early_stream = True
    transcript = ""
    disallowed_tools: tuple[str, ...] = ()

    def __init__(self, script: str, resume: str = "", **files: str) -> None:
        self.script, self.resume, self._files = script, resume, files

    def command(self, instruction_path: str, session: Session) -> list[str]:
        return ["/bin/sh", "-c", self.script]

    def resume_command(self, session: Session) -> list[str] | None:
        return ["/bin/sh", "-c", self.resume, session.session_id] if self.resume else None

    def environment(self, session: Session) -> dict[str, str]:
        return {"OPENAI_API_KEY": session.api_key}

    def files(self, session: Session) -> dict[str, str]:
        return {f".shell/{name}": text for name, text in self._files.items()}

    def binds(self) -> tuple[Bind, ...]:
        return ()

    def check(self) -> None:
        return


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until the condition holds; fail when it doesn't in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.02)
