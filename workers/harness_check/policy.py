"""A test double for an engine and the policy in it: the next turn is read off the prompt, from a script.

It sees what an engine sees, token ids, and nothing else: the plan that a conversation follows and how far it is are
marks in the text (``PLAN:name`` in the task, ``[name#3]`` in the policy's own turns and summaries), so it goes on
after compactions, resumes and re-sent requests like a policy would. Every turn it samples is unlike every other one.

It remembers each request's tokens, to be compared with the records.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from infra.chat.qwen3 import ChatMLRenderer
from infra.sglang.errors import EngineLost
from infra.sglang.generation import GenerateRequest, Generation
from workers.harness_check.hands import Call

PLAN: Final = re.compile(r"PLAN:([a-z]+)")
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
class Step:
    """One turn of a plan. ``{mark}`` in texts and arguments becomes the step's mark; it must be in one of them."""

    text: str = ""
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    held: bool = False
    """The engine doesn't answer until it is released."""
    dies: bool = False
    """The engine is lost in the middle of it; what it had sampled is known."""
    done_by: str = ""
    """Where the prompt has this text the step is behind it, though its mark is gone: the harness dropped the turn."""


@dataclass
class Request:
    """What an engine was asked, and what it sampled: empty while it is held, and when it was aborted."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    held: bool = False
    """It was being held when its harness was killed: nobody gets it, and its generation may no longer speak."""
    lost: bool = False
    """The engine died in the middle of it: the next request has its tokens in its prompt."""


class ScriptedPolicyEngine:
    """An ``proxy.routing.engine.Engine`` without a model."""

    def __init__(self, renderer: ChatMLRenderer, plans: Mapping[str, Sequence[Step]], shell: str) -> None:
        self._renderer, self._plans = renderer, plans
        self._offers = json.dumps(shell)
        self.requests: list[Request] = []
        self.lost: list[str] = []
        """Prompts (their ends) that follow no plan: a fault of the check or of the proxy."""
        self.holding = asyncio.Event()
        self.release = asyncio.Event()
        self._ends: dict[str, asyncio.Event] = {}
        self._begun: dict[str, tuple[int, list[int]]] = {}
        """Call -> prompt tokens and the whole turn, of calls during which the engine died."""

    async def generate(self, asked: GenerateRequest) -> Generation:
        rid, version = asked.rid, asked.version
        request = Request([int(token) for token in asked.input_ids])
        self.requests.append(request)
        call = rid.rpartition(".")[0]
        if call in self._begun:
            before, turn = self._begun[call]
            request.output = turn[len(request.prompt) - before :]
            return _whole(request.output, version)
        step, mark = self._step(self._renderer.decode(request.prompt))
        if step.held and not self.release.is_set():
            request.held = True
            self.holding.set()
            if await self._aborted(rid):
                return Generation([], [], [], "abort", 0)
        request.output = self._spell(step, mark, len(self.requests))[: asked.max_new_tokens]
        if step.dies:
            self._begun[call] = len(request.prompt), request.output
            request.output, request.lost = request.output[: len(request.output) // 2], True
            count = len(request.output)
            raise EngineLost("scripted death", request.output, [-0.5] * count, [version] * count)
        if request.output[-1] in asked.stop_token_ids:
            return _whole(request.output, version)
        count = len(request.output)
        return Generation(request.output, [-0.5] * count, [version] * count, "length", 0)

    async def abort(self, rid: str, deadline_s: float = 1.0) -> None:
        self._ends.setdefault(rid, asyncio.Event()).set()

    async def close(self) -> None:
        return

    async def _aborted(self, rid: str) -> bool:
        """Wait for the release; True when the request was aborted before."""
        end = self._ends.setdefault(rid, asyncio.Event())
        waits = [asyncio.ensure_future(event.wait()) for event in (self.release, end)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return end.is_set()

    def _step(self, prompt: str) -> tuple[Step, str]:
        """What the policy says to a prompt, and the mark of where it is."""
        found = PLAN.search(prompt)
        if found is None or found[1] not in self._plans:
            self.lost.append(prompt[-300:])
            return Step(text="There is nothing to do."), ""
        plan = found[1]
        marks = [int(number) for number in re.findall(rf"\[{plan}#(\d+)\]", prompt)]
        last = max(marks, default=0)
        if any(word in prompt[-TAIL:] for word in SUMMARY_WORDS):
            said = f"The work so far, of which nothing is left out: PLAN:{plan}, up to [{plan}#{last}]."
            return Step(text=f"<analysis>Where it stands.</analysis>\n<summary>{said}</summary>"), ""
        if self._offers not in prompt:
            return Step(text="A title"), ""
        steps = self._plans[plan]
        while last < len(steps) and steps[last].done_by and steps[last].done_by in prompt:
            last += 1
        step = steps[last] if last < len(steps) else Step(text="Finished. {mark}")
        ids = json.dumps(list(dict.fromkeys(AGENT_ID.findall(prompt))))
        calls = tuple(Call(call.name, call.arguments.replace("{ids}", ids)) for call in step.calls)
        return dataclasses.replace(step, calls=calls), f"[{plan}#{last + 1}]"

    def _spell(self, step: Step, mark: str, serial: int) -> list[int]:
        """The step as sampled ids."""
        renderer = self._renderer
        ids: list[int] = []
        if step.thinking:
            thought = f"\n{step.thinking} ({serial})\n".replace("{mark}", mark)
            ids += [renderer.think_open, *renderer.text(thought), renderer.think_close, *renderer.text("\n\n")]
        text = step.text.replace("{mark}", mark)
        if text and "<summary>" not in text:
            text += f" ({serial})"
        ids += renderer.text(text)
        for place, call in enumerate(step.calls):
            ids += renderer.text("\n") if place or text else []
            arguments = call.arguments.replace("{mark}", mark).replace("{serial}", str(serial))
            body = f'\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n'
            ids += [renderer.call_open, *renderer.text(body), renderer.call_close]
        return [*ids, renderer.im_end]


def _whole(output: list[int], version: int) -> Generation:
    return Generation(output, [-0.5] * len(output), [version] * len(output), "stop", 0)
