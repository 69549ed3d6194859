"""The harnesses that gyre knows, by name. Adding one is a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from infra.harness.claude_code import ClaudeCode
from infra.harness.codex import Codex
from infra.harness.harness import Harness, HarnessUnavailable
from infra.harness.mini_adapter import Mini
from infra.harness.mini_swe_agent import MiniSweAgent
from infra.harness.opencode import OpenCode
from infra.harness.qwen_code import QwenCode

DEFAULT_FOLDER: Final = Path(".gyre-harness")
"""Holds a folder for each installed harness."""

_HARNESSES: Final[Mapping[str, Callable[[Path], Harness]]] = {
    "claude-code": lambda folder: ClaudeCode(folder / "claude-code"),
    "codex": lambda folder: Codex(folder / "codex"),
    "mini": lambda folder: Mini(),
    "mini-swe-agent": lambda folder: MiniSweAgent(folder / "mini-swe-agent"),
    "opencode": lambda folder: OpenCode(folder / "opencode"),
    "qwen-code": lambda folder: QwenCode(folder / "qwen-code"),
}

GROUP: Final = "gyre.harnesses"
"""Entry points of packages that bring more."""

NAMES: Final = tuple(sorted(_HARNESSES))


def harness_named(name: str, folder: Path = DEFAULT_FOLDER) -> Harness:
    """The harness of that name; ``folder`` holds the installed ones. Raises HarnessUnavailable for an unknown name."""
    if name in _HARNESSES:
        return _HARNESSES[name](folder)
    for brought in entry_points(group=GROUP, name=name):
        return brought.load()(folder / name)  # type: ignore[no-any-return]
    raise HarnessUnavailable(f"there is no harness {name!r}; there are {', '.join(NAMES)}")
