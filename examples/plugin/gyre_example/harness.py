"""A harness: how `agent.py` is started in an episode's sandbox. `infra/harness/harness.py` says what each member is."""

from __future__ import annotations

import shutil
from pathlib import Path

from infra.harness.harness import HarnessUnavailable, Session
from infra.sandbox.spec import Bind

AGENT = Path(__file__).absolute().with_name("agent.py")
INSIDE = "/gyre/one_shot.py"


class OneShot:
    name = "one-shot"
    version = "0.1.0"
    address_space_mb: int | None = 512
    patience_s = 600.0  # as agent.py has it
    early_stream = True  # it doesn't stream
    transcript = ""
    disallowed_tools: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        """``folder`` is for what has to be installed; this harness needs nothing but the host's python3."""

    def command(self, instruction_path: str, session: Session) -> list[str]:
        return ["/usr/bin/env", "python3", "-I", INSIDE, instruction_path]

    def resume_command(self, session: Session) -> list[str] | None:
        return None

    def environment(self, session: Session) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": session.openai_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_MODEL": session.model,
        }

    def files(self, session: Session) -> dict[str, str]:
        return {}

    def binds(self) -> tuple[Bind, ...]:
        return (Bind(source=AGENT, target=INSIDE),)

    def check(self) -> None:
        if shutil.which("python3", path="/usr/local/bin:/usr/bin") is None:
            raise HarnessUnavailable("one-shot needs the host's python3: install python3")
