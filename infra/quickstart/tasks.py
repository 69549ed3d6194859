"""The quickstart's terminal tasks: small enough for a 0.4M-parameter policy, graded on the workspace left behind.

Families: ``create`` writes a file, ``search`` finds a key's value, ``chain`` follows links from file to file,
``build`` reruns a slow script until it is done and no longer, ``fix`` (harder, not in the default mix) repairs a
script by its test. ``chain`` and ``build`` have a geometric number of turns, ``build`` also sleeps seeded times: the
long tail that elastic scheduling is about.

Invariants: a task is a pure function of the generator's state; the verifier trusts nothing that the agent could have
overwritten (what it expects is written into ``tests/test.sh``); a held-out instance never occurs in a training set,
whatever the seeds, because a digest of the instance decides which of the two it may be in.

It knows nothing of policies, tokens or harnesses.
"""

from __future__ import annotations

import hashlib
import random
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

Family = Literal["create", "search", "chain", "build", "fix"]

FAMILIES: tuple[Family, ...] = get_args(Family)
DEFAULT_FAMILIES: tuple[Family, ...] = ("create", "search", "chain", "build")

_WORDS = """red fox blue oak sun moon star tree lake hill wind rain snow fire rock sand leaf root seed bird
    fish frog bear wolf deer hawk crow dove swan duck goat lamb horse mule gold zinc lead salt milk corn
    boat drum lamp coin rope vase glue silk wool jade ruby plum pear kiwi mint sage fern moss pine elm"""

WORDS: tuple[str, ...] = tuple(_WORDS.split())
"""No word is part of another, so ``grep WORD`` finds only itself."""

ANSWER = "answer.txt"
LOG, LEFT = "out.log", "left.log"
CALC, CHECK = "calc.sh", "test.sh"
AGAIN = "again"

MAX_LINKS = MAX_STAGES = 9
CONTINUE_CHAIN, CONTINUE_BUILD = 0.64, 0.66
"""Probability of one more link or stage."""

PAUSE_MEDIAN, PAUSE_SIGMA, PAUSES_MAX = 0.15, 1.0, 4.0
"""Seconds slept by one stage of a build (log-normal), and by all stages of one task together."""

HELD_OUT_SHARE = 4
"""One instance in this many belongs to the held-out side."""

MISSING, WRONG, STRAY, FULL = 0.0, 0.25, 0.5, 1.0
"""Rewards: nothing there; there but wrong; right, but with stray or changed files; right."""

BUILD_SCRIPT = f"""if read -r pause word < {LEFT}; then
  sleep "$pause"
  sed -i 1d {LEFT}
  echo "$word" >> {LOG}
  if test -s {LEFT}; then echo "step $word"; else echo "$word"; fi
else
  echo {AGAIN} >> {LOG}
  echo {AGAIN}
fi
"""


@dataclass(frozen=True)
class QuickTask:
    """One instance. ``files`` is the workspace before the agent starts; ``goal`` is what only the verifier sees."""

    family: Family
    instruction: str
    files: Mapping[str, str]
    goal: Goal

    @property
    def held_out(self) -> bool:
        """On which side of the split this instance is: decided by what is asked and what solves it."""
        said = repr((self.instruction, self.goal.said()))
        return hashlib.sha256(said.encode()).digest()[0] % HELD_OUT_SHARE == 0

    @property
    def identity(self) -> str:
        """Equal for instances that differ in the pauses of a build only, which are no part of the problem."""
        files = sorted((name, text) for name, text in self.files.items() if name != LEFT)
        return repr((self.instruction, self.goal.said(), files))


@dataclass(frozen=True)
class Goal:
    """``file`` must hold ``text`` (whitespace at the end aside) and the other files must be as ``kept`` says.

    For ``fix`` the text is what the script prints, by argument, in ``prints``.
    """

    file: str
    text: str = ""
    kept: Mapping[str, str] = field(default_factory=dict)
    prints: Mapping[str, str] = field(default_factory=dict)

    def said(self) -> tuple[object, ...]:
        """The same for equal goals, whatever the order in which they were put together."""
        return self.file, self.text, sorted(self.kept.items()), sorted(self.prints.items())


class TasksExhausted(ValueError):
    """A family has fewer distinct instances than were asked for."""


def make_task(rng: random.Random, family: Family | None = None) -> QuickTask:
    """Draw an instance; without ``family``, one of ``DEFAULT_FAMILIES`` at equal odds."""
    return _MAKERS[family or rng.choice(DEFAULT_FAMILIES)](rng)


def make_tasks(*, seed: int, count: int, families: Sequence[Family], held_out: bool) -> list[QuickTask]:
    """``count`` distinct instances of one side of the split, the families taking turns.

    Raises ``TasksExhausted`` when a family has too few instances.
    """
    rng = random.Random(f"quickstart/{seed}")
    tasks: list[QuickTask] = []
    seen: set[str] = set()
    for index in range(count):
        family = families[index % len(families)]
        for _ in range(1000):
            task = make_task(rng, family)
            if task.held_out == held_out and task.identity not in seen:
                break
        else:
            raise TasksExhausted(f"{family}: fewer than {index + 1} distinct instances among {count} tasks")
        seen.add(task.identity)
        tasks.append(task)
    return tasks


def _create(rng: random.Random) -> QuickTask:
    name, text = rng.sample(WORDS, 2)
    return QuickTask("create", f"Create `{name}.txt` with text `{text}`.", {}, Goal(f"{name}.txt", text))


def _search(rng: random.Random) -> QuickTask:
    count = rng.randint(2, 4)
    words = rng.sample(WORDS, 3 * count)
    names, keys, values = words[:count], words[count : 2 * count], words[2 * count :]
    files = {f"{n}.cfg": f"{k}={v}\n" for n, k, v in zip(names, keys, values, strict=True)}
    instruction = f"Find the value of `{keys[0]}` and write it to `{ANSWER}`."
    return QuickTask("search", instruction, files, Goal(ANSWER, values[0], kept=files))


def _chain(rng: random.Random) -> QuickTask:
    length = _geometric(rng, CONTINUE_CHAIN, MAX_LINKS)
    words = rng.sample(WORDS, length + 1)
    files = {f"{here}.txt": f"next={there}\n" for here, there in pairwise(words)}
    files[f"{words[-2]}.txt"] = f"last={words[-1]}\n"
    instruction = f"Follow `{words[0]}.txt` and write the last word to `{ANSWER}`."
    return QuickTask("chain", instruction, files, Goal(ANSWER, words[-1], kept=files))


def _build(rng: random.Random) -> QuickTask:
    stages = _geometric(rng, CONTINUE_BUILD, MAX_STAGES)
    script, *words = rng.sample(WORDS, stages + 1)
    pauses = [rng.lognormvariate(0.0, PAUSE_SIGMA) * PAUSE_MEDIAN for _ in words]
    scale = min(1.0, PAUSES_MAX / sum(pauses))
    left = "".join(f"{pause * scale:.2f} {word}\n" for pause, word in zip(pauses, words, strict=True))
    files = {f"{script}.sh": BUILD_SCRIPT, LEFT: left}
    instruction = f"Run `{script}.sh` until it prints `{words[-1]}`."
    return QuickTask("build", instruction, files, Goal(LOG, "\n".join(words), kept={**files, LEFT: ""}))


def _fix(rng: random.Random) -> QuickTask:
    wrong, right = rng.sample(range(10, 100), 2)
    check = (
        f'got=$(sh {CALC} 0)\nif test "$got" = {right}; then echo PASS; else echo "FAIL want {right} got $got"; fi\n'
    )
    files = {CALC: f"echo $(($1 + {wrong}))\n", CHECK: check}
    instruction = f"Fix `{CALC}` so that `{CHECK}` passes."
    goal = Goal(CALC, kept={CHECK: check}, prints={str(n): str(n + right) for n in (0, 7)})
    return QuickTask("fix", instruction, files, goal)


_MAKERS = {"create": _create, "search": _search, "chain": _chain, "build": _build, "fix": _fix}


def _geometric(rng: random.Random, more: float, limit: int) -> int:
    count = 1
    while count < limit and rng.random() < more:
        count += 1
    return count


def verifier_script(task: QuickTask) -> str:
    """The verifier: POSIX sh, grades ``/workspace``, writes a float in [0, 1] to ``/logs/verifier/reward.txt``.

    Partial credit: a build earns up to 0.5 for a log that is right so far, everything else the constants above.
    The script is one compound command, which the shell reads whole before it runs anything that an agent wrote.
    """
    goal = task.goal
    file, want = shlex.quote(goal.file), shlex.quote(goal.text)
    lines = ["#!/bin/sh", "{", "LC_ALL=C", "export LC_ALL", "cd /workspace || exit 1", f"reward={MISSING}"]
    if task.family == "fix":
        lines += _fix_checks(task)
    else:
        lines += [f"if test -f {file}; then", f"  reward={WRONG}", f"  got=$(cat {file})\n  want={want}"]
        if task.family == "build":
            lines += [*_PROGRESS]
        lines += ['  if test "$got" = "$want"; then', *("    " + line for line in _clean_checks(task)), "  fi", "fi"]
    lines += ["mkdir -p /logs/verifier", 'echo "$reward" > /logs/verifier/reward.txt', "exit 0", "}"]
    return "\n".join(lines) + "\n"


_PROGRESS = (
    '  case "$want" in "$got"*)',
    "    set -f",
    "    set -- $want; stages=$#",
    "    set -- $got; hundredths=$((50 * $# / stages))",
    "    set +f",
    '    reward=$(printf 0.%02d "$hundredths");;',
    "  esac",
)


def _clean_checks(task: QuickTask) -> list[str]:
    """Set the reward for a right answer: full only if no file is stray and none of the kept ones changed."""
    names = sorted({task.goal.file, *task.goal.kept})
    checks = ["set -- *", f'test "$*" = {shlex.quote(" ".join(names))}']
    kept = sorted(task.goal.kept)
    if kept:
        content = "".join(task.goal.kept[name] for name in kept).rstrip("\n")
        checks.append(f'test "$(cat {" ".join(shlex.quote(name) for name in kept)})" = {shlex.quote(content)}')
    return [checks[0], f"reward={STRAY}", f"if {' && '.join(checks[1:])}; then reward={FULL}; fi"]


def _fix_checks(task: QuickTask) -> list[str]:
    file = shlex.quote(task.goal.file)
    right = " && ".join(
        f'test "$(timeout 2 sh {file} {argument} 2>&1)" = {shlex.quote(printed)}'
        for argument, printed in task.goal.prints.items()
    )
    untouched = shlex.quote(task.files[task.goal.file].rstrip("\n"))
    return [
        f"if test -f {file}; then",
        f'  if test "$(cat {file})" != {untouched}; then reward={WRONG}; fi',
        f"  if {right}; then",
        *("    " + line for line in _clean_checks(task)),
        "  fi",
        "fi",
    ]


TASK_TOML = """schema_version = "1.3"

[metadata]
category = "quickstart"
family = "{family}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0

[environment]
docker_image = "debian:bookworm-slim"
network_mode = "no-network"
cpus = 1
memory_mb = 256
"""


def write_task(task: QuickTask, folder: Path) -> None:
    """Write a Harbor-format task: task.toml, instruction.md, environment/ (the workspace's files), tests/test.sh."""
    (folder / "environment").mkdir(parents=True, exist_ok=True)
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "task.toml").write_text(TASK_TOML.format(family=task.family), encoding="utf-8")
    (folder / "instruction.md").write_text(task.instruction + "\n", encoding="utf-8")
    for name, text in task.files.items():
        (folder / "environment" / name).write_text(text, encoding="utf-8")
    script = folder / "tests" / "test.sh"
    script.write_text(verifier_script(task), encoding="utf-8")
    script.chmod(0o755)


def write_task_set(
    folder: Path,
    *,
    seed: int,
    count: int,
    families: Sequence[Family] = DEFAULT_FAMILIES,
    held_out: bool = False,
) -> list[Path]:
    """Write ``count`` tasks as ``folder/tasks/000000``, …; the same arguments always write the same bytes.

    Sets with ``held_out`` true and false share no instance. Raises ``TasksExhausted``.
    """
    tasks = make_tasks(seed=seed, count=count, families=families, held_out=held_out)
    folders = [folder / "tasks" / f"{index:06d}" for index in range(count)]
    for task, target in zip(tasks, folders, strict=True):
        write_task(task, target)
    return folders
