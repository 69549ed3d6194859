"""How gyre's own small agent (``mini.py``) is started: by the host's python3, with nothing installed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from infra.harness.harness import HarnessUnavailable, Session
from infra.harness.mini import READ_TIMEOUT_S
from infra.sandbox.spec import Bind

PYTHONS: Final = ("/usr/bin/python3", "/usr/local/bin/python3")


class Mini:
    name = "mini"
    version = ""
    address_space_mb: int | None = 64
    patience_s = READ_TIMEOUT_S
    early_stream = True
    transcript = ""
    disallowed_tools: tuple[str, ...] = ()

    def __init__(self, max_turns: int = 14, tool_timeout_s: float = 10.0) -> None:
        self._settings = {"MINI_MAX_TURNS": str(max_turns), "MINI_TOOL_TIMEOUT": str(tool_timeout_s)}
        self._python = next((path for path in PYTHONS if Path(path).exists()), "")

    def command(self, instruction_path: str, session: Session) -> list[str]:
        # mini reads INSTRUCTION by itself
        return [self._python, "-I", "-S", "-B", "/gyre/mini.py"]

    def resume_command(self, session: Session) -> list[str] | None:
        return None

    def environment(self, session: Session) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": session.openai_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_MODEL": session.model,
            **self._settings,
        }

    def files(self, session: Session) -> dict[str, str]:
        return {}

    def binds(self) -> tuple[Bind, ...]:
        return (Bind(source=Path(__file__).absolute().with_name("mini.py"), target="/gyre/mini.py"),)

    def check(self) -> None:
        if not self._python:
            raise HarnessUnavailable(f"mini needs python3 in the sandbox, at {' or '.join(PYTHONS)}; install python3")
