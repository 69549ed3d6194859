"""A naive reference of the trajectory mathematics in plain lists, dictionaries and float64, and episodes to try it on.

Tokens are identified by their whole prefix (a tuple), so nothing here resembles a radix tree.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash
from hypothesis import strategies as st

from trajectory.episode import GradedEpisode
from trajectory.records import FIRST_HASH, CallRecord, encode, make_record, record_hash

Prefix = tuple[int, ...]
Key = tuple[str, int, int]
"""(episode, call, offset) of a sampled token."""

PRECEDENCE = ["main", "main_summary", "sub_agent", "sub_agent_summary"]


@dataclass
class Script:
    """Writes an episode call by call."""

    episode: str = "e0"
    records: list[CallRecord] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def call(
        self,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        *,
        parent: int = -1,
        kept: int | None = None,
        agent: str = "root",
        logprobs: Sequence[float] | None = None,
        version: int = 0,
        temperature: float = 1.0,
        side: bool = False,
        summary: bool = False,
        compacts: int = -1,
        tools: bool = True,
        fork: str = "",
    ) -> int:
        """Append a call; ``kept`` defaults to the whole parent. Returns its ``seq``."""
        seq = len(self.records)
        if kept is None:
            kept = self.lengths[parent] if parent >= 0 else 0
        if logprobs is None:
            logprobs = [-(1 + (7 * seq + 3 * i) % 11) / 8 for i in range(len(output))]
        self.records.append(
            make_record(
                episode=self.episode,
                seq=seq,
                prev=record_hash(encode(self.records[-1])) if self.records else FIRST_HASH,
                agent=agent,
                parent=parent,
                kept=kept,
                prompt_ids=prompt,
                output_ids=output,
                logprobs=logprobs,
                versions=[version] * len(output),
                temperature=temperature,
                finish_reason="stop",
                cells=["cell-0"],
                started_at=0.0,
                active_s=0.5,
                held_s=0.25,
                side=side,
                summary=summary,
                compacts=compacts,
                tools=tools,
                fork=fork,
            )
        )
        self.lengths.append(kept + len(prompt) + len(output))
        return seq


FORKS = ["", "agent", "compaction", "dropped", "resume", "opening", "sample", "unexplained"]


def random_script(rng: random.Random, episode: str, calls: int, *, told: bool = False) -> Script:
    """An episode over three token ids, so that paths coincide, diverge and repeat as often as they can.

    ``told``: the records say of themselves, often wrongly, what a proxy tells.
    """
    script = Script(episode)
    for _ in range(calls):
        seq = len(script.records)
        parent = rng.choice([-1, seq - 1, seq - 1, seq - 1, rng.randrange(-1, seq)]) if seq else -1
        length = script.lengths[parent] if parent >= 0 else 0
        kept = rng.choice([length, length, length, rng.randint(0, length)])
        prompt = [rng.randint(1, 3) for _ in range(rng.randint(0 if kept else 1, 4))]
        output = [rng.randint(1, 3) for _ in range(rng.choice([0, 1, 2, 3, 4]))]
        agent = rng.choice(["root", "root", "a", "b"])
        if parent >= 0 and rng.random() < 0.8:
            agent = script.records[parent].agent
        script.call(
            prompt,
            output,
            parent=parent,
            kept=kept,
            agent=agent,
            logprobs=[-rng.random() for _ in output],
            version=rng.randint(3, 5),
            temperature=rng.choice([0.5, 1.0]),
            side=rng.random() < 0.1,
            summary=rng.random() < 0.15,
            compacts=rng.randrange(seq) if told and seq and rng.random() < 0.25 else -1,
            tools=not told or rng.random() < 0.7,
            fork=rng.choice([*FORKS, "", "", ""]) if told else "",
        )
    return script


def scripts(max_calls: int = 12, *, told: bool = False) -> st.SearchStrategy[Script]:
    return st.builds(
        lambda seed, calls, name: random_script(random.Random(seed), f"e{name}", calls, told=told),
        st.integers(0, 2**32),
        st.integers(0, max_calls),
        st.integers(0, 99),
    )


def groups() -> st.SearchStrategy[list[GradedEpisode]]:
    """Two to five episodes with rewards, some excluded."""
    rewards = st.sampled_from([None, 0.0, 0.25, 0.5, 1.0])

    def build(seeds: list[tuple[int, int]], drawn: list[float | None]) -> list[GradedEpisode]:
        return [
            GradedEpisode(
                f"run/g0/e{i}",
                random_script(random.Random(seed), f"run/g0/e{i}", calls, told=seed % 2 == 1).records,
                reward,
            )
            for i, ((seed, calls), reward) in enumerate(zip(seeds, drawn, strict=False))
        ]

    pairs = st.tuples(st.integers(0, 2**32), st.integers(1, 9))
    return st.builds(build, st.lists(pairs, min_size=2, max_size=5), st.lists(rewards, min_size=5, max_size=5))


def sequences(records: Sequence[CallRecord]) -> list[list[int]]:
    """The whole token sequence of each call, as the record defines it."""
    found: list[list[int]] = []
    for r in records:
        kept = found[r.parent][: r.kept] if r.parent >= 0 else []
        found.append([*kept, *r.prompt_ids.tolist(), *r.output_ids.tolist()])
    return found


def samplers(records: Sequence[CallRecord]) -> tuple[dict[Prefix, tuple[int, int]], int]:
    """Who sampled each token first, (call, offset) by prefix, and how many samples came after."""
    first: dict[Prefix, tuple[int, int]] = {}
    duplicates = 0
    for r, tokens in zip(records, sequences(records), strict=True):
        begin = len(tokens) - len(r.output_ids)
        for offset in range(len(r.output_ids)):
            prefix = tuple(tokens[: begin + offset + 1])
            duplicates += prefix in first
            first.setdefault(prefix, (r.seq, offset))
    return first, duplicates


def kinds(records: Sequence[CallRecord]) -> dict[int, str]:
    """Kind of each leaf by ``seq``. Lineages are kept as lists of (call, length) and cut where a call cuts them."""
    lengths = [len(tokens) for tokens in sequences(records)]
    lineage: list[list[int]] = []
    for r in records:
        whole = [c for c in lineage[r.parent] if lengths[c] <= r.kept] if r.parent >= 0 else []
        lineage.append([*whole, r.seq])
    base = [line[-2] if len(line) > 1 else -1 for line in lineage]

    def group(r: CallRecord) -> str:
        summary = r.summary or any(o.compacts == r.seq for o in records)
        return "side" if r.side else "summary" if summary else "line"

    window: list[int] = []
    for r in records:
        new = r.parent == -1 or r.kept == 0 or records[r.parent].agent != r.agent
        earlier = [o for o in records[: r.seq] if o.agent == r.agent and group(o) != "side"]
        last_line = max((o.seq for o in earlier if group(o) == "line"), default=-1)
        later_summaries = [o for o in earlier if group(o) == "summary" and o.seq > last_line]
        untold = r.fork in ("", "unexplained")
        if group(r) == "line" and untold and later_summaries and last_line >= 0 and base[r.seq] < last_line:
            new = True
        if not new and group(r) == "line" and base[r.seq] == -1:
            members = [o for o in records[: r.seq] if window[o.seq] == window[r.parent]]
            whole_prompt = lengths[members[0].seq] - len(members[0].output_ids)
            new = r.kept < whole_prompt and any(o.seq in base for o in members)
        if r.compacts >= 0 or (group(r) == "line" and r.fork in ("agent", "compaction", "opening")):
            new = True
        same = [window[o.seq] for o in records[: r.seq] if r.compacts >= 0 and o.compacts == r.compacts]
        window.append(same[0] if same else max(window, default=-1) + 1 if new else window[r.parent])

    def is_continued(c: int) -> bool:
        return any(
            base[d.seq] == c
            and window[d.seq] == window[c]
            and (group(d) == "line" or group(d) == group(records[c]) or is_continued(d.seq))
            for d in records[c + 1 :]
        )

    def is_alone(r: CallRecord) -> bool:
        single = window.count(window[r.seq]) == 1 and r.agent == "root" and not r.tools and r.compacts < 0
        others = any(o.tools and o.agent == "root" and group(o) != "side" for o in records)
        return single and group(r) == "line" and others

    leaves = [r for r in records if not is_continued(r.seq)]
    found: dict[int, str] = {}
    for r in leaves:
        last = max(
            (o.seq for o in leaves if window[o.seq] == window[r.seq] and group(o) == "line"),
            default=-1,
        )
        name = "main" if r.agent == "root" else "sub_agent"
        if r.side or is_alone(r):
            found[r.seq] = "side"
        elif group(r) == "summary":
            found[r.seq] = f"{name}_summary"
        else:
            found[r.seq] = name if r.seq == last else "dead"
    return found


def sampled_on(records: Sequence[CallRecord], call: int) -> list[Prefix]:
    """Prefixes of the sampled tokens on the path of a call."""
    first, _ = samplers(records)
    tokens = sequences(records)[call]
    return [p for p in (tuple(tokens[: i + 1]) for i in range(len(tokens))) if p in first]


def ownership(records: Sequence[CallRecord], selected: Sequence[int]) -> dict[int, list[Prefix]]:
    """Owned tokens by selected leaf, in the order in which the leaves are given."""
    taken: set[Prefix] = set()
    owned = {}
    for call in selected:
        owned[call] = [p for p in sampled_on(records, call) if p not in taken]
        taken.update(owned[call])
    return owned


def selection(
    episode: str, records: Sequence[CallRecord], cap: int | None, draw: str = "seeded", reserve: int = 0
) -> list[int]:
    """``seq`` of the selected leaves, chronological."""

    def rank(seq: int, kind: str) -> int:
        if draw == "chronological":
            return seq
        if draw == "longest":
            return -len(sequences(records)[seq])
        return xxhash.xxh3_64_intdigest(f"{episode}/{kind}/{seq}".encode())

    candidates = [(seq, kind) for seq, kind in kinds(records).items() if kind in PRECEDENCE]
    candidates.sort(key=lambda c: (PRECEDENCE.index(c[1]), rank(*c), c[0]))
    chosen: list[int] = []

    def take(seqs: list[int], places: int | None) -> None:
        nonlocal chosen
        for seq in seqs:
            if places is not None and len(chosen) == places:
                break
            covered = {p for c in chosen for p in sampled_on(records, c)}
            if set(sampled_on(records, seq)) - covered:
                owned = ownership(records, sorted([*chosen, seq]))
                chosen = [c for c in owned if owned[c]]

    if reserve:
        take([seq for seq, kind in candidates if kind.endswith("summary")], reserve)
    take([seq for seq, _ in candidates], cap)
    return chosen


def advantages(rewards: Sequence[float | None], rule: str = "group") -> list[float | None]:
    valid = [r for r in rewards if r is not None]
    mean = sum(valid) / len(valid)
    std = math.sqrt(sum((r - mean) ** 2 for r in valid) / len(valid))
    found: list[float | None] = []
    for position, r in enumerate(rewards):
        others = [o for i, o in enumerate(rewards) if o is not None and i != position]
        if r is None:
            found.append(None)
        elif rule == "group":
            found.append((r - mean) / (std + 1e-6))
        elif rule == "leave_one_out":
            found.append(r - sum(others) / len(others))
        else:
            found.append(r - mean)
    return found


def has_gradient(group: Sequence[GradedEpisode]) -> bool:
    valid = [e for e in group if e.reward is not None]
    rewards = [e.reward for e in valid if e.reward is not None]
    trainable = any(
        sampled_on(e.records, seq) for e in valid for seq, kind in kinds(e.records).items() if kind in PRECEDENCE
    )
    return len(rewards) >= 2 and max(rewards) - min(rewards) >= 1e-4 and trainable


@dataclass(frozen=True)
class Choices:
    """Every choice by name, with the design's defaults."""

    cap: int | None = 5
    draw: str = "seeded"
    reserve: int = 0
    advantage: str = "group"
    reduction: str = "episode_tokens"
    loss: str = "gspo"
    old: str = "proximal"
    low: float = 3e-4
    high: float = 4e-4
    truncation: float = 2.0


def owned_tokens(episode: GradedEpisode, choices: Choices) -> list[list[Key]]:
    """What each selected trajectory of an episode owns."""
    first, _ = samplers(episode.records)
    chosen = selection(episode.episode, episode.records, choices.cap, choices.draw, choices.reserve)
    owned = ownership(episode.records, chosen)
    return [[(episode.episode, *first[p]) for p in tokens] for tokens in owned.values()]


def normaliser(group: Sequence[GradedEpisode], choices: Choices) -> int:
    valid = [e for e in group if e.reward is not None]
    if choices.reduction == "tokens":
        return sum(len(tokens) for e in valid for tokens in owned_tokens(e, choices))
    return len(valid)


def loss(
    group: Sequence[GradedEpisode], table: dict[Key, float], choices: Choices, frozen: dict[Key, float] | None = None
) -> tuple[float, dict[Key, float]]:
    """Σ_e ℓ_e and its gradient by sampled token, the formulas of the design written out.

    ``frozen``: the policy wherever a formula stops the gradient; that of ``table`` by default.
    """
    frozen = table if frozen is None else frozen
    total = 0.0
    gradient = dict.fromkeys(table, 0.0)
    for episode, advantage in zip(group, advantages([e.reward for e in group], choices.advantage), strict=True):
        if advantage is None:
            continue
        owned = owned_tokens(episode, choices)
        everything = sum(len(keys) for keys in owned)
        for keys in owned:
            factor = {
                "episode_tokens": len(keys) / everything,
                "episode_trajectories": 1 / len(owned),
                "tokens": len(keys),
            }[choices.reduction]
            behaviour = [float(episode.records[call].logprobs[offset]) for _, call, offset in keys]
            value, parts = _trajectory_loss(
                [table[k] for k in keys], [frozen[k] for k in keys], behaviour, advantage, choices
            )
            total += factor * value
            for k, part in zip(keys, parts, strict=True):
                gradient[k] += factor * part
    return total, gradient


def _trajectory_loss(
    policy: list[float], frozen: list[float], behaviour: list[float], advantage: float, choices: Choices
) -> tuple[float, list[float]]:
    """ℓ_τ and its gradient by token."""
    n = len(policy)
    old = frozen if choices.old == "proximal" else behaviour

    def clip(ratio: float) -> float:
        return min(max(ratio, 1 - choices.low), 1 + choices.high)

    def weight(log_ratio: float) -> float:
        return min(math.exp(log_ratio), choices.truncation) if choices.old == "proximal" else 1.0

    if choices.loss in ("gspo", "gspo_token"):
        w = weight(sum(f - b for f, b in zip(frozen, behaviour, strict=True)) / n)
        s = math.exp(sum(p - o for p, o in zip(policy, old, strict=True)) / n)
        alive = s * advantage <= clip(s) * advantage
        return -w * min(s * advantage, clip(s) * advantage), [-w * s * advantage / n if alive else 0.0] * n
    value, parts = 0.0, []
    for p, f, o, b in zip(policy, frozen, old, behaviour, strict=True):
        w = weight(f - b)
        if choices.loss == "grpo":
            r = math.exp(p - o)
            value -= w * min(r * advantage, clip(r) * advantage) / n
            parts.append(-w * r * advantage / n if r * advantage <= clip(r) * advantage else 0.0)
        else:
            value -= w * clip(math.exp(f - o)) * advantage * p / n
            parts.append(-w * clip(math.exp(f - o)) * advantage / n)
    return value, parts
