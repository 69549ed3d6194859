"""The command line's own fault: one clear line, exit code 2, nothing half-started."""

from __future__ import annotations


class UsageError(RuntimeError):
    """What is wrong, where, and how to mend it, in one line."""
