"""mini-swe-agent from PyPI in a virtual environment of its own, seen inside at the path that it has outside.

It speaks Chat Completions without streaming (through litellm) and keeps its conversation in memory, so it cannot be
resumed: its trajectory file is written for people.
"""

from __future__ import annotations

from infra.harness.harness import Session
from infra.harness.install import PACKAGES, PackagedHarness, interpreter_prefix
from infra.sandbox.spec import Bind


class MiniSweAgent(PackagedHarness):
    package = PACKAGES["mini-swe-agent"]
    address_space_mb = 4096
    patience_s = 600.0
    transcript = "trajectory.json"

    def command(self, instruction_path: str, session: Session) -> list[str]:
        options = f'-m "openai/$1" -t "$(cat "$2")" -y --exit-immediately -o "$HOME/{self.transcript}"'
        start = f'exec "$0" -m minisweagent.run.mini {options}'
        return ["/bin/sh", "-c", start, str(self.folder / "bin" / "python"), session.model, instruction_path]

    def resume_command(self, session: Session) -> list[str] | None:
        return None

    def environment(self, session: Session) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": session.openai_url,
            "OPENAI_API_BASE": session.openai_url,
            "OPENAI_API_KEY": session.api_key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def binds(self) -> tuple[Bind, ...]:
        prefix = interpreter_prefix(self.folder)
        folders = [self.folder] if prefix.is_relative_to("/usr") else [self.folder, prefix]
        return tuple(Bind(source=folder, target=str(folder)) for folder in folders)
