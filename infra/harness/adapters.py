"""How each harness is started in a sandbox: its command, its environment, what it needs bound, and what it lacks.

A harness is run unmodified. All that it learns is a base URL, an API key, a model name and the task; whatever it
does with them is seen by the model gateway. It knows nothing of episodes and sandboxes beyond what a path inside is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from infra.harness.install import MINI_SWE_AGENT_VERSION, installed_version, interpreter_prefix
from infra.sandbox.spec import Bind

INSTRUCTION: Final = "/gyre/instruction.md"
"""Where the task's instruction is bound."""

PYTHONS: Final = ("/usr/bin/python3", "/usr/local/bin/python3")
DEFAULT_FOLDER: Final = Path(".gyre-harness")
"""Holds a virtual environment for each installed harness."""


class HarnessUnavailable(RuntimeError):
    """The harness is not installed here. The message says how to mend it."""


class Harness(Protocol):
    name: str
    address_space_mb: int | None
    """MiB of address space that the harness itself needs, on top of the task's; None: it cannot live with a limit."""

    def command(self, instruction_path: str, model: str) -> list[str]:
        """Program and arguments, with paths as seen inside the sandbox."""

    def environment(self, base_url: str, api_key: str, model: str) -> dict[str, str]:
        """Variables besides the sandbox's own."""

    def binds(self) -> tuple[Bind, ...]:
        """What it needs from the host, read-only."""

    def check(self) -> None:
        """Raises HarnessUnavailable."""


class Mini:
    """gyre's own small agent (``infra/harness/mini.py``), run by the host's python3."""

    name = "mini"
    address_space_mb: int | None = 64

    def __init__(self, max_turns: int = 14, tool_timeout_s: float = 10.0) -> None:
        self._settings = {"MINI_MAX_TURNS": str(max_turns), "MINI_TOOL_TIMEOUT": str(tool_timeout_s)}
        self._python = next((path for path in PYTHONS if Path(path).exists()), "")

    def command(self, instruction_path: str, model: str) -> list[str]:
        # mini reads INSTRUCTION by itself
        return [self._python, "-I", "-S", "-B", "/gyre/mini.py"]

    def environment(self, base_url: str, api_key: str, model: str) -> dict[str, str]:
        return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": model, **self._settings}

    def binds(self) -> tuple[Bind, ...]:
        return (Bind(source=Path(__file__).absolute().with_name("mini.py"), target="/gyre/mini.py"),)

    def check(self) -> None:
        if not self._python:
            raise HarnessUnavailable(f"mini needs python3 in the sandbox, at {' or '.join(PYTHONS)}; install python3")


class MiniSweAgent:
    """mini-swe-agent from PyPI in a virtual environment of its own, seen inside at the path that it has outside."""

    name = "mini-swe-agent"
    address_space_mb: int | None = 4096

    def __init__(self, folder: Path) -> None:
        self._venv = folder.absolute()

    def command(self, instruction_path: str, model: str) -> list[str]:
        options = '-m "openai/$1" -t "$(cat "$2")" -y --exit-immediately -o "$HOME/trajectory.json"'
        start = f'exec "$0" -m minisweagent.run.mini {options}'
        return ["/bin/sh", "-c", start, str(self._venv / "bin" / "python"), model, instruction_path]

    def environment(self, base_url: str, api_key: str, model: str) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_BASE": base_url,
            "OPENAI_API_KEY": api_key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def binds(self) -> tuple[Bind, ...]:
        prefix = interpreter_prefix(self._venv)
        folders = [self._venv] if prefix.is_relative_to("/usr") else [self._venv, prefix]
        return tuple(Bind(source=folder, target=str(folder)) for folder in folders)

    def check(self) -> None:
        mend = f"python -m infra.harness.install mini-swe-agent --into {self._venv}"
        version = installed_version(self._venv, "mini-swe-agent")
        if version is None:
            raise HarnessUnavailable(f"mini-swe-agent is not installed in {self._venv}: {mend}")
        if version != MINI_SWE_AGENT_VERSION:
            raise HarnessUnavailable(
                f"mini-swe-agent in {self._venv} is {version}, gyre knows {MINI_SWE_AGENT_VERSION}: {mend}"
            )


_HARNESSES: Mapping[str, Callable[[Path], Harness]] = {
    "mini": lambda folder: Mini(),
    "mini-swe-agent": lambda folder: MiniSweAgent(folder / "mini-swe-agent"),
}


def harness_named(name: str, folder: Path = DEFAULT_FOLDER) -> Harness:
    """The harness of that name; ``folder`` holds the installed ones. Raises HarnessUnavailable for an unknown name."""
    if name not in _HARNESSES:
        raise HarnessUnavailable(f"there is no harness {name!r}; there are {', '.join(sorted(_HARNESSES))}")
    return _HARNESSES[name](folder)
