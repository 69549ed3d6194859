"""Which scenarios each harness is checked with: the plan, how much is said to fit, the kills, the kinds that are right.

Numbers of leaves are sets where the harness decides by its own estimates when it compacts. It runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from workers.harness_check import plans
from workers.harness_check.hands import Hands
from workers.harness_check.network import Fault
from workers.harness_check.policy import Step

FAULTS: Final[Mapping[int, Fault]] = {3: "unanswered", 5: "halved", 8: "cut", 11: "closed", 13: "twice"}
BREAKS: Final = ("halved", "cut")
"""Qwen Code takes a stream that breaks for the end of its work. The gateway opens its streams only when the turn is
there, and then sends it whole, so that the connection would have to break within that one message."""

SLOW_S: Final = 370.0
"""More than the five minutes after which common clients give up on a silent stream."""


@dataclass(frozen=True)
class Scenario:
    name: str
    plan: Callable[[Hands], Mapping[str, list[Step]]]
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
    """How long the engine holds a step that is marked so. Such a scenario runs only when it is named."""
    faults: Mapping[int, Fault] = field(default_factory=dict[int, Fault])
    """What the network does to which model request."""
    files: Mapping[str, str] = field(default_factory=lambda: {"out.txt": "made\n"})
    """What the workspace holds at the end."""


def scenarios_of(harness: str, turns: int = 16) -> dict[str, Scenario]:
    """The scenarios that a harness can be checked with, in order."""
    side = {"side": {1}} if harness == "opencode" else {}
    found = [
        Scenario(
            "loop",
            lambda hands: {"main": plans.loop(hands, turns)},
            turns,
            {"main": {1}, **side},
            files={"out.txt": plans.WRITTEN.replace("first line", "first  changed line"), "mark.txt": "[main#15]"},
        )
    ]
    if harness == "claude-code":
        found += [
            Scenario("odd", lambda hands: {"main": plans.odd(hands)}, 6, {"main": {1}, "dead": {1}}),
            Scenario("agents", plans.nested, 15, {"main": {1}, "sub_agent": {4}}),
            Scenario("agents-background", plans.background, 10, {"main": {1}, "sub_agent": {2}}),
            Scenario(
                "agents-compaction",
                lambda hands: plans.long_agent(hands, 8, 14_000),
                12,
                {"main": {1}, "sub_agent": {2, 3}, "sub_agent_summary": {1, 2}},
                told_context=104_000,
            ),
            Scenario(
                "compaction",
                lambda hands: {"main": plans.long(hands, 8, 14_000)},
                11,
                {"main": {2, 3}, "main_summary": {1, 2}},
                told_context=104_000,
            ),
            Scenario(
                "compaction-reactive",
                lambda hands: {"main": plans.long(hands, 8, 14_000)},
                11,
                {"main": {2, 3}, "main_summary": {1, 2}},
                context_limit=96_000,
            ),
        ]
    if harness in ("codex", "opencode", "qwen-code"):
        # opencode has its summary written from a transcript, by a request that shares nothing with the conversation
        summaries = {"side": {2, 3}} if side else {"main_summary": {1, 2, 3}}
        found.append(
            Scenario(
                "compaction",
                lambda hands: {"main": plans.long(hands, 8, 14_000)},
                11,
                {"main": {2, 3, 4}, **summaries},
                told_context=120_000 if harness == "qwen-code" else 72_000,
            )
        )
    if harness in ("codex", "opencode", "qwen-code"):
        found.append(Scenario("agents", plans.agents, 10, {"main": {1}, "sub_agent": {2}, **side}))
    if harness not in ("mini", "mini-swe-agent"):
        found.append(
            Scenario(
                "resume",
                lambda hands: {"main": plans.killed(hands)},
                6,
                # Qwen Code lists the workspace anew in what opens the conversation: another context window
                {"main": {2} if harness == "qwen-code" else {1}, "dead": {0, 1}, **side},
                kills=True,
            )
        )
    found.append(
        Scenario(
            "faults",
            lambda hands: {"main": plans.faulty(hands)},
            8,
            {"main": {1}, **side},
            faults={number: fault for number, fault in FAULTS.items() if harness != "qwen-code" or fault not in BREAKS},
        )
    )
    found.append(Scenario("slow", lambda hands: {"main": plans.slow(hands)}, 3, {"main": {1}, **side}, hold_s=SLOW_S))
    return {scenario.name: scenario for scenario in found}
