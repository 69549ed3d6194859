"""Which scenarios each harness is checked with: the script, how much is said to fit, the kills, which kinds are right.

Numbers of leaves are sets where the harness decides by its own estimates when it compacts. It runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from workers.harness_check import scripts
from workers.harness_check.network import Fault
from workers.harness_check.tools import HarnessTools

FAULTS: Final[Mapping[int, Fault]] = {3: "unanswered", 5: "halved", 8: "cut", 11: "closed", 13: "twice"}
BREAKS: Final = ("halved", "cut")
"""Qwen Code takes a stream that breaks for the end of its work. The gateway opens its streams only when the turn is
there, and then sends it whole, so that the connection would have to break within that one message."""

SLOW_S: Final = 370.0
"""More than the five minutes after which common clients give up on a silent stream."""


@dataclass(frozen=True)
class Scenario:
    name: str
    script: Callable[[HarnessTools], scripts.Scripts]
    turns: int
    """Calls at least."""
    kinds: Mapping[str, set[int]]
    told_context: int = 400_000
    """Tokens of context that the harness is told."""
    context_limit: int = 400_000
    """Tokens at which the gateway refuses a prompt."""
    kills: bool = False
    """Kill once while a command runs and once while a call is in flight, and resume each time."""
    hold_s: float = 0.0
    """How long the engine holds a turn that is marked so. Such a scenario runs only when it is named."""
    faults: Mapping[int, Fault] = field(default_factory=dict[int, Fault])
    """What the network does to which model request."""
    files: Mapping[str, str] = field(default_factory=lambda: {"out.txt": "made\n"})
    """What the workspace holds at the end."""


def scenarios_of(harness: str, turns: int = 16) -> dict[str, Scenario]:
    """The scenarios that a harness can be checked with, in order."""
    main = {"main": {1}} | ({"side": {1}} if harness == "opencode" else {})
    written = {"out.txt": scripts.WRITTEN.replace("first line", "first  changed line"), "mark.txt": "[main#15]"}
    scenarios = [Scenario("loop", partial(scripts.loop, turns=turns), turns, main, files=written)]
    if harness == "claude-code":
        compacted = {"main": {2, 3}, "main_summary": {1, 2}}
        agent_compacted = {"main": {1}, "sub_agent": {2, 3}, "sub_agent_summary": {1, 2}}
        scenarios += [
            Scenario("odd", scripts.odd, 6, {"main": {1}, "dead": {1}}),
            Scenario("agents", scripts.nested, 15, {"main": {1}, "sub_agent": {4}}),
            Scenario("agents-background", scripts.background, 10, {"main": {1}, "sub_agent": {2}}),
            Scenario("agents-compaction", scripts.long_agent, 12, agent_compacted, told_context=104_000),
            Scenario("compaction", scripts.long, 11, compacted, told_context=104_000),
            Scenario("compaction-reactive", scripts.long, 11, compacted, context_limit=96_000),
        ]
    if harness in ("codex", "opencode", "qwen-code"):
        # opencode has its summary written from a transcript, by a request that shares nothing with the conversation
        summaries = {"side": {2, 3}} if harness == "opencode" else {"main_summary": {1, 2, 3}}
        context = 120_000 if harness == "qwen-code" else 72_000
        scenarios += [
            Scenario("compaction", scripts.long, 11, {"main": {2, 3, 4}, **summaries}, told_context=context),
            Scenario("agents", scripts.agents, 10, {**main, "sub_agent": {2}}),
        ]
    if harness not in ("mini", "mini-swe-agent"):
        # Qwen Code lists the workspace anew in what opens the conversation: another context window
        resumed = {**main, "main": {2} if harness == "qwen-code" else {1}, "dead": {0, 1}}
        scenarios.append(Scenario("resume", scripts.killed, 6, resumed, kills=True))
    faults = {number: fault for number, fault in FAULTS.items() if harness != "qwen-code" or fault not in BREAKS}
    scenarios.append(Scenario("faults", scripts.faulty, 8, main, faults=faults))
    scenarios.append(Scenario("slow", scripts.slow, 3, main, hold_s=SLOW_S))
    return {scenario.name: scenario for scenario in scenarios}
