"""How gyre's processes end."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Exit without finalising the interpreter.

    The Temporal SDK's native threads may still hand results to Python then, and abort the process (exit code 134)
    after all its work is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
