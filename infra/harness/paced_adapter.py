"""How the scripted harness of ``gyre bench elastic`` (``paced.py``) is started: exactly as mini is."""

from __future__ import annotations

from pathlib import Path

from infra.harness.harness import Session
from infra.harness.mini_adapter import Mini
from infra.sandbox.spec import Bind


class Paced(Mini):
    name = "bench-paced"

    def command(self, instruction_path: str, session: Session) -> list[str]:
        return [self._python, "-I", "-S", "-B", "/gyre/paced.py"]

    def environment(self, session: Session) -> dict[str, str]:
        return {**super().environment(session), "PACED_SESSION": session.session_id}

    def binds(self) -> tuple[Bind, ...]:
        script = Path(__file__).absolute().with_name("paced.py")
        return (*super().binds(), Bind(source=script, target="/gyre/paced.py"))
