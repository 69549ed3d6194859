"""A demonstrator for the quickstart's tasks, and the tools it works with, emulated in this process.

Invariant: what an emulated tool answers equals, bit for bit, what the ``mini`` harness answers in a real workspace,
because a policy that is warm-started on these transcripts meets the real ones. A command whose real output the
emulation doesn't know raises ``NotEmulated``; nothing is guessed.

It knows nothing of tokens or policies.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from infra.chat.messages import Message, Tool, ToolCall
from infra.quickstart.tasks import (
    AGAIN,
    BUILD_SCRIPT,
    CALC,
    CHECK,
    FULL,
    LEFT,
    LOG,
    MISSING,
    STRAY,
    WORDS,
    WRONG,
    QuickTask,
)

TOOLS: tuple[Tool, ...] = tuple(Tool(name=name) for name in ("bash", "write_file", "edit_file", "submit"))
"""By name, in the order in which ``mini`` declares them."""

OUTPUT_LIMIT = 160
"""Characters of a tool's output that the policy gets to see."""

MAX_TURNS = 14

Arguments = Mapping[str, str]


class NotEmulated(ValueError):
    """The emulation doesn't know what this command prints."""


@dataclass(frozen=True)
class Demonstration:
    """``messages`` starts with the user's and ends with an assistant's; ``reward`` is the verifier's."""

    messages: tuple[Message, ...]
    reward: float


class EmulatedTools:
    """``mini``'s tools over a workspace held in a dictionary, file name to text."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)

    def call(self, name: str, arguments: Arguments) -> str:
        """What the tool answers. Raises ``NotEmulated`` for an unknown tool or command."""
        try:
            if name == "bash":
                return shown(self._bash(arguments["command"]))
            if name == "write_file":
                self.files[arguments["path"]] = arguments["content"]
                return "ok"
            if name == "edit_file":
                return self._edit(arguments["path"], arguments["old"], arguments["new"])
        except KeyError:
            return "error: bad arguments"
        raise NotEmulated(name)

    def _edit(self, path: str, old: str, new: str) -> str:
        if path not in self.files:
            return "error: no such file"
        if old not in self.files[path]:
            return "error: old not found"
        self.files[path] = self.files[path].replace(old, new, 1)
        return "ok"

    def _bash(self, command: str) -> str:
        match command.split(" "):
            case ["ls"]:
                return "".join(f"{name}\n" for name in sorted(self.files))
            case ["cat", name] if _plain(name):
                return self.files.get(name, f"cat: {name}: No such file or directory\n")
            case ["grep", word, "*"] if word.isalpha():
                return self._grep(word)
            case ["sh", name] if self.files.get(name) == BUILD_SCRIPT:
                return self._build()
            case ["sh", name] if name == CHECK and name in self.files:
                return self._check(self.files[name])
        raise NotEmulated(command)

    def _grep(self, word: str) -> str:
        names = sorted(self.files)
        if not names:
            return "grep: *: No such file or directory\n"
        found = [(name, line) for name in names for line in self.files[name].splitlines() if word in line]
        return "".join(f"{name}:{line}\n" if len(names) > 1 else f"{line}\n" for name, line in found)

    def _build(self) -> str:
        if LEFT not in self.files:
            raise NotEmulated(f"a build without {LEFT}")
        stage, _, self.files[LEFT] = self.files[LEFT].partition("\n")
        word = stage.partition(" ")[2] if stage else AGAIN
        self.files[LOG] = self.files.get(LOG, "") + f"{word}\n"
        return f"step {word}\n" if self.files[LEFT] else f"{word}\n"

    def _check(self, text: str) -> str:
        want = re.search(r"FAIL want (\d+) got", text)
        adds = re.fullmatch(r"echo \$\(\(\$1 \+ (\d+)\)\)\n", self.files.get(CALC, ""))
        if want is None or adds is None:
            raise NotEmulated(f"{CHECK} with scripts of another form")
        return "PASS\n" if want[1] == adds[1] else f"FAIL want {want[1]} got {adds[1]}\n"


def shown(output: str) -> str:
    """The part of a tool's output that ``mini`` hands to the policy."""
    return output.rstrip("\n")[:OUTPUT_LIMIT]


def _plain(name: str) -> bool:
    return re.fullmatch(r"\w+(\.\w+)?", name) is not None


def grade(task: QuickTask, files: Mapping[str, str]) -> float:
    """The reward that the task's verifier gives this final workspace.

    Raises ``NotEmulated`` for a ``fix`` whose script isn't of the known form.
    """
    goal = task.goal
    if goal.file not in files:
        return MISSING
    got = files[goal.file].rstrip("\n")
    if goal.prints:
        adds = re.fullmatch(r"echo \$\(\(\$1 \+ (\d+)\)\)", got)
        if adds is None:
            raise NotEmulated(f"grading {goal.file}")
        if any(str(int(n) + int(adds[1])) != printed for n, printed in goal.prints.items()):
            return MISSING if files[goal.file] == task.files[goal.file] else WRONG
    elif got != goal.text:
        if task.family == "build" and goal.text.startswith(got):
            return 50 * len(got.split()) // len(goal.text.split()) / 100
        return WRONG
    names = {goal.file, *goal.kept}
    kept = sorted(goal.kept)
    same = "".join(files.get(n, "") for n in kept).rstrip("\n") == "".join(goal.kept[n] for n in kept).rstrip("\n")
    return FULL if set(files) == names and same else STRAY


Action = tuple[str, dict[str, str]]
SUBMIT: Action = ("submit", {})


def demonstrate(rng: random.Random, task: QuickTask, *, mistake_rate: float) -> Demonstration:
    """Play the task with an expert that makes a mistake on each turn at ``mistake_rate``.

    Half of the mistakes give up (submit early), the others use a wrong word or look around. A wrong look is retried,
    a wrong write is believed. Who believes to be done submits at once, so episodes end when they should.
    """
    tools = EmulatedTools(task.files)
    expert = _Expert(task)
    messages = [Message(role="user", content=task.instruction)]
    for turn in range(MAX_TURNS):
        action = expert.next_action()
        if action != SUBMIT and rng.random() < mistake_rate:
            action = _mistake(rng, action)
        name, arguments = action
        call = ToolCall(id=f"call-{turn}", name=name, arguments=json.dumps(arguments, ensure_ascii=False))
        messages.append(Message(role="assistant", tool_calls=(call,)))
        if action == SUBMIT or turn + 1 == MAX_TURNS:
            break
        output = tools.call(name, arguments)
        messages.append(Message(role="tool", content=output, tool_call_id=call.id))
        expert.observe(name, arguments, output)
    return Demonstration(tuple(messages), grade(task, tools.files))


def _mistake(rng: random.Random, action: Action) -> Action:
    name, arguments = action
    kind = rng.random()
    if kind < 0.5:
        return SUBMIT
    command = arguments.get("command", "")
    if kind < 0.8 and name == "write_file":
        slip = {"content": rng.choice(WORDS)} if rng.random() < 0.5 else {"path": rng.choice(WORDS) + ".txt"}
        return name, {**arguments, **slip}
    if kind < 0.8 and name == "edit_file":
        return name, {**arguments, "new": f"+ {rng.randint(10, 99)}"}
    if kind < 0.8 and command.startswith("cat "):
        return name, {"command": f"cat {rng.choice(WORDS)}.txt"}
    if kind < 0.8 and command.startswith("grep "):
        return name, {"command": f"grep {rng.choice(WORDS)} *"}
    return "bash", {"command": "ls"}


class _Expert:
    """Knows what to do next from what the tools have shown so far."""

    def __init__(self, task: QuickTask) -> None:
        self._family = task.family
        self._quoted = re.findall(r"`([^`]+)`", task.instruction)
        self._seen = ""  # the link, value or line of output that the next action depends on
        self._done = False
        self._adds = self._wants = ""

    def next_action(self) -> Action:
        if self._done:
            return SUBMIT
        first, last = self._quoted[0], self._quoted[-1]
        match self._family:
            case "create":
                return "write_file", {"path": first, "content": last}
            case "search" if not self._seen:
                return "bash", {"command": f"grep {first} *"}
            case "chain" if not self._seen.startswith("last="):
                return "bash", {"command": f"cat {self._seen[5:] + '.txt' if self._seen else first}"}
            case "search" | "chain":
                return "write_file", {"path": last, "content": self._seen.partition("=")[2]}
            case "build":
                return "bash", {"command": f"sh {first}"}
        if not self._adds:
            return "bash", {"command": f"cat {CALC}"}
        if not self._wants:
            return "bash", {"command": f"sh {CHECK}"}
        return "edit_file", {"path": CALC, "old": f"+ {self._adds}", "new": f"+ {self._wants}"}

    def observe(self, name: str, arguments: Arguments, output: str) -> None:
        command = arguments.get("command", "")
        if self._family == "fix":
            self._observe_fix(name, arguments, output)
        elif name == "write_file":
            self._done = True
        elif self._family == "build":
            self._done = output == self._quoted[-1]
        elif (command.startswith("grep ") and output) or (command.startswith("cat ") and "=" in output):
            self._seen = output

    def _observe_fix(self, name: str, arguments: Arguments, output: str) -> None:
        if name == "edit_file":
            self._adds, self._wants = arguments["new"][2:], ""
        elif arguments["command"] == f"cat {CALC}":
            self._adds = output.removeprefix("echo $(($1 + ").removesuffix("))")
        elif arguments["command"] == f"sh {CHECK}":
            self._done = output == "PASS"
            self._wants = "" if self._done else output.split(" ")[2]
