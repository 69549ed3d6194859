"""Harnesses by name: gyre's own, and those of installed packages.

To add one here is a file beside this one and a line in the table. A package of its own names it under
``[project.entry-points."gyre.harnesses"]``; what it has to give is in ``infra/harness/harness.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from infra.harness.claude_code import ClaudeCode
from infra.harness.codex import Codex
from infra.harness.harness import Harness, HarnessUnavailable, missing_members
from infra.harness.mini_adapter import Mini
from infra.harness.mini_swe_agent import MiniSweAgent
from infra.harness.opencode import OpenCode
from infra.harness.qwen_code import QwenCode
from trajectory.plugins import Choices, PluginError

DEFAULT_FOLDER: Final = Path(".gyre-harness")
"""Holds a folder for each installed harness."""

_BUILT_IN: Final[Mapping[str, Callable[[Path], Harness]]] = {
    "claude-code": ClaudeCode,
    "codex": Codex,
    "mini": lambda folder: Mini(),
    "mini-swe-agent": MiniSweAgent,
    "opencode": OpenCode,
    "qwen-code": QwenCode,
}

NAMES: Final = tuple(sorted(_BUILT_IN))
"""Of gyre's own; ``known`` has all."""

HARNESSES: Final = Choices(NAMES, "gyre.harnesses")


def known() -> dict[str, str]:
    """Name -> the package that brings the harness, with its version; empty for gyre's own. Raises HarnessUnavailable
    when a name is taken twice."""
    try:
        plugins = HARNESSES.plugins
    except PluginError as error:
        raise HarnessUnavailable(str(error)) from error
    packages = {name: entry.dist for name, entry in plugins.items()}
    brought = {name: f"{package.name} {package.version}" if package else "?" for name, package in packages.items()}
    return dict(sorted({**dict.fromkeys(NAMES, ""), **brought}.items()))


def harness_named(name: str, folder: Path = DEFAULT_FOLDER) -> Harness:
    """The harness of that name; ``folder`` holds the installed ones. Raises HarnessUnavailable for a name that isn't
    there, is taken twice, or is that of something that is no harness."""
    if name not in known():
        raise HarnessUnavailable(f"there is no harness {name!r}; there are {', '.join(known())}")
    if name in _BUILT_IN:
        return _BUILT_IN[name](folder / name)
    try:
        return _plugin(name, folder / name)
    except PluginError as error:
        raise HarnessUnavailable(str(error)) from error


def _plugin(name: str, folder: Path) -> Harness:
    make = HARNESSES.load(name)
    if not callable(make):
        raise HARNESSES.unusable(name, "it is neither a class nor a function")
    try:
        harness: Harness = make(folder)
    except Exception as error:  # whatever the package raises
        raise HARNESSES.unusable(name, f"it is not made: {type(error).__name__}: {error}") from error
    if missing := missing_members(harness):
        raise HARNESSES.unusable(name, f"it lacks {', '.join(missing)}; infra/harness/harness.py says what they are")
    if harness.name != name:
        raise HARNESSES.unusable(name, f"its harness calls itself {harness.name!r}; both names must be the same")
    return harness
