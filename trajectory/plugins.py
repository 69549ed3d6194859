"""Names that a configuration chooses from: gyre's own, and those that installed packages add as entry points.

Names are read without importing what they stand for, so a configuration can be checked where neither torch nor a
package's own dependencies should be loaded. Invariant: a name stands for one thing; a package that takes a name which
is taken already, or whose object can't be imported, is an error that names it, and never left out. The standard
library only: workflow code may import this.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points


class PluginError(ValueError):
    """An entry point that can't be used. The message names it, its package, and what is wrong with it."""


class Choices:
    """``built_in`` names, the default first, and those of the entry points in ``group`` (none without a group)."""

    def __init__(self, built_in: Iterable[str], group: str = "") -> None:
        self.built_in, self.group = tuple(built_in), group

    @property
    def names(self) -> tuple[str, ...]:
        """All of them. Raises PluginError."""
        return (*self.built_in, *self.plugins)

    @cached_property
    def plugins(self) -> dict[str, EntryPoint]:
        """By name, read once a process. Raises PluginError when a name is taken twice."""
        plugins: dict[str, EntryPoint] = {}
        for entry in sorted(entry_points(group=self.group), key=str) if self.group else ():
            taken_by = "gyre itself" if entry.name in self.built_in else _package(plugins.get(entry.name))
            plugins[entry.name] = entry
            if taken_by:
                raise self._unusable(entry, f"the name is taken by {taken_by}; uninstall one of them, or rename it")
        return plugins

    def check(self, name: str) -> str:
        """``name``, for pydantic. Raises ValueError, with the names that there are, when it isn't one of them."""
        if name not in self.built_in and name not in self.plugins:
            raise ValueError(f"{name!r} is none of {', '.join(self.names)}")
        return name

    def load(self, name: str) -> object:
        """The object of a plugin. Raises PluginError when its import fails."""
        entry = self.plugins[self.check(name)]
        try:
            return entry.load()
        except Exception as error:  # whatever the package raises while it is imported
            raise self.unusable(name, f"{entry.value} is not loaded: {type(error).__name__}: {error}") from error

    def unusable(self, name: str, why: str) -> PluginError:
        """The error of a plugin whose object is not what it should be."""
        return self._unusable(self.plugins[name], why)

    def _unusable(self, entry: EntryPoint, why: str) -> PluginError:
        return PluginError(f"entry point {entry.name!r} of {self.group} in {_package(entry)}: {why}")


def _package(entry: EntryPoint | None) -> str:
    if entry is None:
        return ""
    return f"package {entry.dist.name}" if entry.dist else "a package without metadata"
