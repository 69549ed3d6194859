"""How a policy uses each harness's tools: names and arguments, as the harness publishes them.

Arguments are JSON text, written the way a policy might: in whatever order, with blanks and escapes. It knows no
scenario.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class ScriptedToolCall:
    """A tool call as the policy will spell it."""

    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True)
class HarnessTools:
    """Tool names and argument names; an empty tool name: the harness has no such tool, and the shell does it."""

    shell: str
    command: str = "command"
    shell_more: tuple[tuple[str, Any], ...] = ()
    """What the shell tool requires besides the command."""
    patience: str = ""
    """Numeric argument of the shell tool: milliseconds."""
    write: str = ""
    edit: str = ""
    path: str = "file_path"
    content: str = "content"
    old: str = "old_string"
    new: str = "new_string"
    agent: str = ""
    """Starts a sub-agent."""
    prompt: str = "prompt"
    agent_more: tuple[tuple[str, Any], ...] = (("description", "look"), ("subagent_type", "general-purpose"))
    """What the sub-agent tool requires besides the prompt."""
    wait: str = ""
    """Waits for sub-agents, where starting one doesn't."""
    submit: str = ""
    """Shell command, or tool, without which the harness doesn't end."""

    def run(self, command: str) -> ScriptedToolCall:
        return _call(self.shell, {self.command: command, **dict(self.shell_more)})

    def run_backwards(self, command: str) -> ScriptedToolCall:
        """The same with the keys in the other order, escapes, and blanks where JSON has them."""
        given = [*reversed(self.shell_more), (self.command, command)]
        body = " ,  ".join(f"{json.dumps(name)} :{json.dumps(value)}" for name, value in given)
        return ScriptedToolCall(self.shell, f"{{ {body} }}")

    def run_with_patience(self, command: str, milliseconds: str) -> ScriptedToolCall:
        """With a number spelled as ``milliseconds`` spells it: ``5000``, ``5000.0`` or, in quotes, a string."""
        run = self.run(command)
        if not self.patience:
            return run
        return ScriptedToolCall(self.shell, f"{run.arguments[:-1]}, {json.dumps(self.patience)}: {milliseconds}}}")

    def write_file(self, name: str, content: str) -> ScriptedToolCall:
        if not self.write:
            return self.run(f"cat > {name} <<'END_OF_FILE'\n{content.rstrip(chr(10))}\nEND_OF_FILE")
        return _call(self.write, {self.path: f"/workspace/{name}", self.content: content})

    def edit_file(self, name: str, old: str, new: str) -> ScriptedToolCall:
        if not self.edit:
            return self.run(f"sed -i 's/{old}/{new}/' {name}")
        return _call(self.edit, {self.old: old, self.path: f"/workspace/{name}", self.new: new})

    def start_agent(self, prompt: str, **more: Any) -> ScriptedToolCall:
        return _call(self.agent, {**dict(self.agent_more), self.prompt: prompt, **more})

    def wait_for_agents(self) -> ScriptedToolCall:
        """For all that were started; ``{ids}`` is put in when they are known."""
        return ScriptedToolCall(self.wait, '{"targets": {ids}, "timeout_ms": 60000}')

    def finish(self) -> ScriptedToolCall | None:
        if not self.submit:
            return None
        return _call(self.submit, {}) if " " not in self.submit else self.run(self.submit)


def _call(name: str, arguments: dict[str, Any]) -> ScriptedToolCall:
    return ScriptedToolCall(name, json.dumps(arguments))


DESCRIBED: Final = (("description", "look"),)
TOOLS: Final = {
    "mini": HarnessTools(
        shell="bash", write="write_file", edit="edit_file", path="path", old="old", new="new", submit="submit"
    ),
    "mini-swe-agent": HarnessTools(shell="bash", submit="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    "claude-code": HarnessTools(
        shell="Bash",
        shell_more=DESCRIBED,
        patience="timeout",
        write="Write",
        edit="Edit",
        agent="Agent",
        agent_more=(*DESCRIBED, ("subagent_type", "general-purpose"), ("run_in_background", False)),
    ),
    "codex": HarnessTools(
        shell="exec_command",
        command="cmd",
        patience="yield_time_ms",
        agent="multi_agent_v1.spawn_agent",
        prompt="message",
        agent_more=(),
        wait="multi_agent_v1.wait_agent",
    ),
    "qwen-code": HarnessTools(
        shell="run_shell_command",
        shell_more=(("is_background", False), *DESCRIBED),
        patience="timeout",
        write="write_file",
        edit="edit",
        agent="agent",
    ),
    "opencode": HarnessTools(
        shell="bash",
        shell_more=DESCRIBED,
        patience="timeout",
        write="write",
        edit="edit",
        path="filePath",
        old="oldString",
        new="newString",
        agent="task",
        agent_more=(*DESCRIBED, ("subagent_type", "general")),
    ),
}
