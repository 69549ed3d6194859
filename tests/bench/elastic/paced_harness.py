"""The scripted harness of `bench elastic` (``paced.py``), started as mini is.

No choice for a run: the entry point that brings it is in ``plugin/``, and only the bench's own stack finds that folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from infra.harness.harness import Session
from infra.harness.mini_adapter import Mini
from infra.sandbox.spec import Bind

PLUGIN: Final = Path(__file__).absolute().with_name("plugin")
"""A folder for ``sys.path`` in which there is an installed package, as far as ``importlib.metadata`` can tell."""


class Paced(Mini):
    name = "bench-paced"

    def __init__(self, folder: Path) -> None:
        """Nothing is installed in the folder."""
        super().__init__()

    def command(self, instruction_path: str, session: Session) -> list[str]:
        return [self._python, "-I", "-S", "-B", "/gyre/paced.py"]

    def environment(self, session: Session) -> dict[str, str]:
        return {**super().environment(session), "PACED_SESSION": session.session_id}

    def binds(self) -> tuple[Bind, ...]:
        script = Path(__file__).absolute().with_name("paced.py")
        return (*super().binds(), Bind(source=script, target="/gyre/paced.py"))
