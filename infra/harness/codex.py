"""Codex: one native binary that speaks the Responses API, with compaction and resume.

It names its session itself; a HOME holds one episode's sessions only, so the last one is the episode's.
"""

from __future__ import annotations

import json
from typing import Final

from infra.harness.harness import RESUMED, STREAM_PATIENCE_S, Session
from infra.harness.install import PACKAGES, PackagedHarness
from infra.sandbox.spec import Bind

FOLDER: Final = "/gyre/codex"
KEY: Final = "GYRE_API_KEY"
SETTINGS: Final = """\
model = {model}
model_provider = "gyre"
model_context_window = {context_limit}
model_auto_compact_token_limit = {room}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
web_search = "disabled"

[analytics]
enabled = false

[feedback]
enabled = false

[features]
apps = false
enable_request_compression = false
image_generation = false

[shell_environment_policy]
exclude = ["{key}"]

[model_providers.gyre]
name = "gyre"
base_url = {url}
env_key = "{key}"
wire_api = "responses"
supports_websockets = false
request_max_retries = 100
stream_max_retries = 100
stream_idle_timeout_ms = {stream_ms}

[projects."/workspace"]
trust_level = "trusted"
"""


class Codex(PackagedHarness):
    package = PACKAGES["codex"]
    transcript = ".codex/sessions"
    disallowed_tools = ("web_search", "image_generation")

    def command(self, instruction_path: str, session: Session) -> list[str]:
        start = f'exec {FOLDER}/bin/codex exec {self._options()} - < "$0"'
        return ["/bin/sh", "-c", start, instruction_path]

    def resume_command(self, session: Session) -> list[str] | None:
        start = f'exec {FOLDER}/bin/codex exec resume {self._options()} --last "$0" < /dev/null'
        return ["/bin/sh", "-c", start, RESUMED]

    def _options(self) -> str:
        return "--json --strict-config --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check"

    def environment(self, session: Session) -> dict[str, str]:
        return {KEY: session.api_key}

    def files(self, session: Session) -> dict[str, str]:
        settings = SETTINGS.format(
            model=json.dumps(session.model),
            url=json.dumps(session.openai_url),
            key=KEY,
            context_limit=session.context_limit,
            room=session.room,
            stream_ms=int(1000 * STREAM_PATIENCE_S),
        )
        return {".codex/config.toml": settings}

    def binds(self) -> tuple[Bind, ...]:
        return (Bind(source=self.package.program(self.folder).parents[1], target=FOLDER),)
