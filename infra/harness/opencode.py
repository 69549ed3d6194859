"""opencode: one native binary that speaks Chat Completions, with sub-agents and resume.

Titles are asked for under ``gyre-side``, so that the gateway knows them for side calls. Old tool results are not pruned
from the conversation: that would be another one.
"""

from __future__ import annotations

import json
from typing import Any, Final

from infra.harness.harness import RESUMED, SIDE_MODEL, Session
from infra.harness.install import PACKAGES, PackagedHarness
from infra.sandbox.spec import Bind

PROGRAM: Final = "/gyre/opencode"
KEY: Final = "GYRE_API_KEY"


class OpenCode(PackagedHarness):
    package = PACKAGES["opencode"]
    transcript = ".local/share/opencode"
    disallowed_tools = ("webfetch", "websearch", "codesearch")

    def command(self, instruction_path: str, session: Session) -> list[str]:
        return ["/bin/sh", "-c", f'exec {PROGRAM} run --format json --auto < "$0"', instruction_path]

    def resume_command(self, session: Session) -> list[str] | None:
        start = f'printf %s "$0" | exec {PROGRAM} run --format json --auto --continue'
        return ["/bin/sh", "-c", start, RESUMED]

    def environment(self, session: Session) -> dict[str, str]:
        return {
            KEY: session.api_key,
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_SHARE": "1",
            "OPENCODE_DISABLE_PRUNE": "1",
        }

    def files(self, session: Session) -> dict[str, str]:
        limit = {"context": session.context_limit, "output": session.max_output}
        settings: dict[str, Any] = {
            "model": f"gyre/{session.model}",
            "small_model": f"gyre/{SIDE_MODEL}",
            "autoupdate": False,
            "share": "disabled",
            "permission": {"*": "allow", **dict.fromkeys(self.disallowed_tools, "deny")},
            "provider": {
                "gyre": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "gyre",
                    "options": {
                        "baseURL": session.openai_url,
                        "apiKey": f"{{env:{KEY}}}",
                        "timeout": False,  # of a whole answer, its stream included
                    },
                    "models": {
                        name: {"name": name, "reasoning": True, "tool_call": True, "limit": limit}
                        for name in (session.model, SIDE_MODEL)
                    },
                }
            },
        }
        return {".config/opencode/opencode.json": json.dumps(settings, indent=1)}

    def binds(self) -> tuple[Bind, ...]:
        return (Bind(source=self.package.program(self.folder), target=PROGRAM),)
