"""Claude Code: one native binary that speaks Anthropic Messages, with sub-agents, compaction and resume.

It compacts by itself when the usage of its answers comes near ``CLAUDE_CODE_AUTO_COMPACT_WINDOW`` (a turn's output and
about 13,000 tokens are kept free), which it doesn't take below 100,000 tokens: in a smaller context it compacts when
the gateway refuses a prompt as too long. All model names are set to one, so that every sub-agent asks for the policy.
"""

from __future__ import annotations

from typing import Final

from infra.harness.harness import RESUMED, STREAM_PATIENCE_S, Session
from infra.harness.install import PACKAGES, PackagedHarness
from infra.sandbox.spec import Bind

PROGRAM: Final = "/gyre/claude"
TIERS: Final = ("OPUS", "SONNET", "HAIKU", "FABLE")
QUIET: Final = (
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    "DISABLE_AUTOUPDATER",
    "DISABLE_TELEMETRY",
    "DISABLE_ERROR_REPORTING",
    "DISABLE_BUG_COMMAND",
    "DISABLE_COST_WARNINGS",
)


class ClaudeCode(PackagedHarness):
    package = PACKAGES["claude-code"]
    transcript = ".claude/projects"
    disallowed_tools = (
        "WebSearch",
        "WebFetch",
        "Workflow",
        "CronCreate",
        "CronDelete",
        "CronList",
        "ScheduleWakeup",
    )

    def command(self, instruction_path: str, session: Session) -> list[str]:
        start = f'exec {PROGRAM} -p {self._options()} --session-id "$1" < "$0"'
        return ["/bin/sh", "-c", start, instruction_path, session.session_id]

    def resume_command(self, session: Session) -> list[str] | None:
        start = f'exec {PROGRAM} -p {self._options()} --resume "$1" "$0" < /dev/null'
        return ["/bin/sh", "-c", start, RESUMED, session.session_id]

    def _options(self) -> str:
        tools = ",".join(self.disallowed_tools)
        return f"--output-format stream-json --verbose --dangerously-skip-permissions --disallowedTools {tools}"

    def environment(self, session: Session) -> dict[str, str]:
        return {
            "ANTHROPIC_BASE_URL": session.base_url,
            "ANTHROPIC_API_KEY": session.api_key,
            "ANTHROPIC_MODEL": session.model,
            **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": session.model for tier in TIERS},
            "CLAUDE_CODE_SUBAGENT_MODEL": session.model,
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(session.room),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(session.max_output),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "API_TIMEOUT_MS": str(int(1000 * self.patience_s)),
            # pings are no signs of life to it, and without this it gives up after 300 s
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(int(1000 * STREAM_PATIENCE_S)),
            **dict.fromkeys(QUIET, "1"),
        }

    def binds(self) -> tuple[Bind, ...]:
        return (Bind(source=self.package.program(self.folder), target=PROGRAM),)
