"""Episodes as long ones are: context compactions, sub-agents with a common prompt, and a record per call.

Tokens are drawn at random from a seed; what is real is the shape: which call keeps how much of which other, and how
many tokens each adds and samples. Records come encoded and chained, as they lie in the store.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trajectory.columns import Int32
from trajectory.records import FIRST_HASH, encode, make_record, record_hash

VOCABULARY = 150_000


@dataclass(frozen=True)
class SyntheticShape:
    """About how large an episode is; each varies by a fifth around it."""

    tokens: int = 700_000
    """Unique tokens."""
    calls: int = 300
    windows: int = 4
    """Context windows of the main agent: one more than compactions."""
    agents: int = 4
    """Sub-agents."""
    agent_calls: int = 12
    """Calls of each sub-agent."""
    sampled: float = 0.15
    """Share of a turn's new tokens that the policy sampled; the rest came from tools."""
    prompt: float = 0.03
    """Share of ``tokens`` in the system prompt and the tools: all windows begin with it."""


@dataclass
class _Writer:
    name: str
    rng: np.random.Generator
    version: int
    encoded: list[bytes] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    previous: str = FIRST_HASH

    def draw(self, count: int) -> Int32:
        return self.rng.integers(0, VOCABULARY, max(count, 1), np.int32)

    def call(self, prompt: Int32, sampled: int, *, agent: str, parent: int = -1, kept: int = 0, **more: object) -> int:
        output = self.draw(sampled)
        seq = len(self.encoded)
        record = make_record(
            episode=self.name,
            seq=seq,
            prev=self.previous,
            agent=agent,
            parent=parent,
            kept=kept,
            prompt_ids=prompt,
            output_ids=output,
            logprobs=-self.rng.random(len(output), np.float32),
            versions=np.full(len(output), self.version, np.int32),
            temperature=1.0,
            finish_reason="stop",
            cells=["cell-0"],
            started_at=1.0 * seq,
            active_s=1.0,
            held_s=0.0,
            **more,
        )
        data = encode(record)
        self.previous = record_hash(data)
        self.encoded.append(data)
        self.lengths.append(kept + len(prompt) + len(output))
        return seq

    def go_on(self, call: int, added: int, sampled: int, *, agent: str) -> int:
        return self.call(
            self.draw(added), sampled, agent=agent, parent=call, kept=self.lengths[call] if call >= 0 else 0
        )


def encoded_episode(name: str, seed: int, shape: SyntheticShape) -> list[bytes]:
    """The encoded records of one episode, in order; equal arguments give equal bytes."""
    rng = np.random.default_rng(seed)
    writer = _Writer(name, rng, version=int(rng.integers(3, 5)))
    size = rng.uniform(0.8, 1.2)
    prompt = int(shape.tokens * shape.prompt)
    main_calls = max(shape.calls - shape.agents * shape.agent_calls - (shape.windows - 1), 2 * shape.windows)
    turns = main_calls + shape.agents * shape.agent_calls
    turn = max(int((shape.tokens * size - prompt) / turns), 4)
    sampled = max(int(turn * shape.sampled), 1)
    system, agent_system = writer.draw(prompt), writer.draw(prompt // 4)
    per_window = main_calls // shape.windows
    with_agents = [i * shape.windows // max(shape.agents, 1) for i in range(shape.agents)]
    summary = -1
    for window in range(shape.windows):
        last = -1
        for turn_of in range(per_window):
            if last >= 0:
                last = writer.go_on(last, turn - sampled, sampled, agent="root")
            elif window == 0:
                first = np.concatenate([system, writer.draw(turn)])
                last = writer.call(first, sampled, agent="root", fork="agent")
            else:
                opening = writer.draw(turn)
                last = writer.call(
                    opening, sampled, agent="root", parent=0, kept=prompt, compacts=summary, fork="compaction"
                )
            if turn_of == per_window // 2:
                for agent in (i for i, of in enumerate(with_agents) if of == window):
                    _sub_agent(
                        writer,
                        f"root/{last}.{agent}",
                        agent_system,
                        turn=turn,
                        sampled=sampled,
                        calls=shape.agent_calls,
                    )
        if window < shape.windows - 1:
            kept = writer.lengths[last]
            summary = writer.call(
                writer.draw(turn // 4), 2 * sampled, agent="root", parent=last, kept=kept, summary=True, fork="summary"
            )
    return writer.encoded


def _sub_agent(writer: _Writer, agent: str, system: Int32, *, turn: int, sampled: int, calls: int) -> None:
    call = writer.call(np.concatenate([system, writer.draw(turn)]), sampled, agent=agent, fork="agent")
    for _ in range(calls - 1):
        call = writer.go_on(call, turn - sampled, sampled, agent=agent)
