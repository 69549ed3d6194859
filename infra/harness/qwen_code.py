"""Qwen Code: a JavaScript bundle, run by the host's Node.js, that speaks Chat Completions, with sub-agents, compaction
and resume.

It takes a stream that breaks for the end of its work, and says that it succeeded; so its streams are opened late.
Node.js waits 300 s for the first byte of an answer, and it asks again when there was none.

Its memory between sessions is off: an agent of its own would fill it when the work is done, and no session follows.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Final

from infra.harness.harness import RESUMED, STREAM_PATIENCE_S, HarnessUnavailable, Session
from infra.harness.install import PACKAGES, PackagedHarness
from infra.sandbox.spec import Bind

FOLDER: Final = "/gyre/qwen-code"
NODE_MAJOR: Final = 20
NODES: Final = ("/usr/bin/node", "/usr/local/bin/node")


class QwenCode(PackagedHarness):
    package = PACKAGES["qwen-code"]
    patience_s = 300.0
    early_stream = False
    transcript = ".qwen/projects"
    disallowed_tools = ("web_fetch", "web_search", "cron_create", "cron_list", "cron_delete")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._node = next((path for path in NODES if Path(path).exists()), "")

    def command(self, instruction_path: str, session: Session) -> list[str]:
        start = f'exec "$0" {FOLDER}/cli.js {self._options()} --session-id "$2" < "$1"'
        return ["/bin/sh", "-c", start, self._node, instruction_path, session.session_id]

    def resume_command(self, session: Session) -> list[str] | None:
        start = f'exec "$0" {FOLDER}/cli.js {self._options()} --resume "$2" -p "$1" < /dev/null'
        return ["/bin/sh", "-c", start, self._node, RESUMED, session.session_id]

    def _options(self) -> str:
        tools = " ".join(f"--exclude-tools {tool}" for tool in self.disallowed_tools)
        return f"--auth-type openai --yolo --output-format stream-json --chat-recording {tools}"

    def environment(self, session: Session) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": session.openai_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_MODEL": session.model,
            "QWEN_TELEMETRY_ENABLED": "false",
        }

    def files(self, session: Session) -> dict[str, str]:
        settings = {
            "$version": 4,  # what it would be migrated to
            "general": {"enableAutoUpdate": False},
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "model": {
                "generationConfig": {
                    "contextWindowSize": session.context_limit,
                    "timeout": int(1000 * STREAM_PATIENCE_S),
                    "maxRetries": 100,
                    "samplingParams": {"max_tokens": session.max_output},
                }
            },
        }
        return {".qwen/settings.json": json.dumps(settings, indent=1)}

    def binds(self) -> tuple[Bind, ...]:
        return (Bind(source=self.package.program(self.folder).parent, target=FOLDER),)

    def check(self) -> None:
        super().check()
        if not self._node:
            raise HarnessUnavailable(f"qwen-code needs Node.js {NODE_MAJOR} at {' or '.join(NODES)}: install nodejs")
        line = [self._node, "--version"]
        version = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False).stdout
        major = version.strip().removeprefix("v").partition(".")[0]
        if not major.isdigit() or int(major) < NODE_MAJOR:
            raise HarnessUnavailable(f"qwen-code needs Node.js {NODE_MAJOR} or newer; {self._node} is {version!r}")
