"""A test double for a policy: the next turn is read off the prompt, from a script.

It knows nothing but the prompt: the script that a conversation follows and how far it is are marks in the text
(``SCRIPT:name`` in the task, ``[name#3]`` in the policy's own turns and summaries), so it goes on after compactions,
resumes and re-sent requests like a policy would. Every turn it samples is unlike every other one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from infra.chat.qwen3 import Qwen3Renderer
from workers.harness_check.engine import ScriptedTurn
from workers.harness_check.tools import ScriptedToolCall

SCRIPT: Final = re.compile(r"SCRIPT:([a-z]+)")
AGENT_ID: Final = re.compile(r'"agent_id": ?"([0-9a-f-]{36})"')
"""As Codex tells it of a sub-agent that it has started."""
SUMMARY_WORDS: Final = (
    "Respond with TEXT ONLY",  # Claude Code
    "CONTEXT CHECKPOINT COMPACTION",  # Codex
    "Do not mention the summary process",  # opencode
    "Then, generate the <state_snapshot>",  # Qwen Code
)
"""By which the harnesses' requests for a summary are known."""
TAIL: Final = 12_000
"""Characters at the end of a prompt in which a request for a summary stands."""


@dataclass(frozen=True)
class Line:
    """One turn of a script, in words. ``{mark}`` in texts and arguments becomes its mark; one of them must have it."""

    text: str = ""
    thinking: str = ""
    calls: tuple[ScriptedToolCall, ...] = ()
    held: bool = False
    """The engine holds it back."""
    dies: bool = False
    """The engine is lost in the middle of it; what it had sampled is known."""
    done_by: str = ""
    """Where the prompt has this text the line is behind it, though its mark is gone: the harness dropped the turn."""


class ScriptedPolicy:
    def __init__(self, renderer: Qwen3Renderer, lines: Mapping[str, Sequence[Line]], shell: str) -> None:
        """``lines`` of each script; ``shell``: the tool without which a request is for a title or the like."""
        self._renderer, self._lines = renderer, lines
        self._offers = json.dumps(shell)
        self._said = 0
        self.lost: list[str] = []
        """Prompts (their ends) that follow no script: a fault of the check or of the proxy."""

    def say(self, prompt: list[int]) -> ScriptedTurn:
        self._said += 1
        line, mark, agents = self._line(self._renderer.decode(prompt))
        return ScriptedTurn(self._spell(line, mark, agents), held=line.held, dies=line.dies)

    def _line(self, prompt: str) -> tuple[Line, str, list[str]]:
        """What the policy says to a prompt, the mark of where it is, and the sub-agents that it knows."""
        named = SCRIPT.search(prompt)
        if named is None or named[1] not in self._lines:
            self.lost.append(prompt[-300:])
            return Line(text="There is nothing to do."), "", []
        script = named[1]
        last = max((int(number) for number in re.findall(rf"\[{script}#(\d+)\]", prompt)), default=0)
        if any(words in prompt[-TAIL:] for words in SUMMARY_WORDS):
            summary = f"The work so far, of which nothing is left out: SCRIPT:{script}, up to [{script}#{last}]."
            text = f"<analysis>Where it stands.</analysis>\n<summary>{summary}</summary>"
            return Line(text=text), "", []
        if self._offers not in prompt:
            return Line(text="A title"), "", []
        lines = self._lines[script]
        while last < len(lines) and lines[last].done_by and lines[last].done_by in prompt:
            last += 1
        line = lines[last] if last < len(lines) else Line(text="Finished. {mark}")
        return line, f"[{script}#{last + 1}]", list(dict.fromkeys(AGENT_ID.findall(prompt)))

    def _spell(self, line: Line, mark: str, agents: list[str]) -> list[int]:
        """The line as sampled ids."""
        renderer, ids = self._renderer, list[int]()
        if line.thinking:
            thought = f"\n{line.thinking} ({self._said})\n".replace("{mark}", mark)
            ids += [renderer.think_open, *renderer.text(thought), renderer.think_close, *renderer.text("\n\n")]
        text = line.text.replace("{mark}", mark)
        if text and "<summary>" not in text:
            text += f" ({self._said})"
        ids += renderer.text(text)
        known = {"{mark}": mark, "{serial}": str(self._said), "{ids}": json.dumps(agents)}
        for place, call in enumerate(line.calls):
            arguments = call.arguments
            for name, value in known.items():
                arguments = arguments.replace(name, value)
            ids += renderer.text("\n") if place or text else []
            body = f'\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n'
            ids += [renderer.call_open, *renderer.text(body), renderer.call_close]
        return [*ids, renderer.im_end]
