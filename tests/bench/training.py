"""What a forward and backward pass costs with the cap on trajectories, without it, and with shared prefixes once.

Episodes of 3, 4 and 6 context windows, made as for the first half of the benchmark but small enough for one CPU thread,
are processed with the cap of five and without, and go through a replica with prefixes written out and computed once.
What each form should cost follows from its tokens, its attended pairs and its targets, by prices that are fitted in
the same run to trajectories that share nothing. CPU time of whole ``Replica.train`` calls, all forms in turn in each
repetition; the median of what a form took relative to one reference form, which runs before and after each: what else
the machine does slows both. That both ways of a form give the same gradient is checked in the same run.

Importing it prepares this process for Megatron (``infra.megatron.model.cpu_shim``), and measuring leaves the process
keeping the memory that it frees: for a process that then ends.
"""

from __future__ import annotations

import ctypes
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from infra.megatron.model.pack import Runs
from infra.megatron.replica import Replica
from tests.bench.synthetic_episodes import SyntheticShape, encoded_episode
from trajectory.config import OptimizerConfig, TrajectoryConfig
from trajectory.episode import GradedEpisode
from trajectory.micro_step import MicroStep
from trajectory.process import process_group
from trajectory.records import decode_chain

CAP: Final = 5
PUBLISHED_CAP_SAVING: Final = 0.252
"""Share of the training time that the cap of five is published to save."""

MAX_PREDICTION_ERROR: Final = 0.10
MIN_SHARE_OF_IDEAL: Final = 0.90
MAX_GRADIENT_DISTANCE: Final = 1e-5
FLOOR: Final = 1e-3
"""A tensor's difference is relative to its own norm, or to this share of the whole gradient's if that is larger."""


SMALL: Final = {"tokens": 2500, "calls": 40, "hidden": 64}
"""Sizes for a run of seconds, with the same limits."""


class TrainingBenchSizes(BaseModel):
    """Sizes of the measurement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    windows: tuple[int, ...] = (3, 4, 6)
    """Context windows of an episode, one shape each."""
    tokens: int = Field(default=3000, ge=600)
    """Unique tokens of an episode, about. Two episodes are trained at once."""
    calls: int = Field(default=60, ge=24)
    repetitions: int = Field(default=5, ge=1)
    hidden: int = Field(default=128, ge=32, multiple_of=32)
    layers: int = Field(default=2, ge=1)
    vocab: int = Field(default=1024, ge=64)
    seed: int = 0


@dataclass(frozen=True)
class MeasuredForm:
    """What is measured: micro-steps, and the counts that their cost follows from."""

    name: str
    micro_steps: tuple[MicroStep, ...]

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """(passes, tokens, attended pairs, targets): each has a price."""
        pairs = sum(int((Runs.of(each).positions + 1).sum()) for each in self.micro_steps)
        tokens, targets = (sum(getattr(each, what) for each in self.micro_steps) for what in ("tokens", "targets"))
        return len(self.micro_steps), tokens, pairs, targets


def measure(sizes: TrainingBenchSizes) -> dict[str, Any]:
    """Seconds, predictions and savings of every shape, and whether the limits hold."""
    _keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
            replica = _replica(Path(folder), sizes)
            forms = {form.name: form for windows in sizes.windows for form in _forms(sizes, windows)}
            known = _known_forms(sizes, max(form.counts[1] for form in forms.values()))
            apart = {
                f"{windows} windows, {cap}": _gradient_distance(
                    replica, forms[f"{windows}/{cap}/apart"], forms[f"{windows}/{cap}/once"]
                )
                for windows in sizes.windows
                for cap in ("cap", "all")
            }
            seconds = _seconds(replica, [*known, *forms.values()], known[-1], sizes.repetitions)
    finally:
        torch.set_num_threads(threads)
    prices = _fitted([(form.counts, seconds[form.name]) for form in known])
    rows = [_row(form, seconds[form.name], prices) for form in forms.values()]
    savings = [
        _saving(windows, cap, [forms[f"{windows}/{cap}/{way}"] for way in ("apart", "once")], seconds, prices)
        for windows in sizes.windows
        for cap in ("cap", "all")
    ]
    worst = max(abs(row["error"]) for row in rows)
    least = min(saving["share_of_ideal"] for saving in savings)
    return {
        "plan": sizes.model_dump(),
        "prices": dict(zip(("pass_s", "token_s", "pair_s", "target_s"), prices, strict=True)),
        "rows": rows,
        "compute_once": savings,
        "cap_saving": {
            str(windows): round(1 - seconds[f"{windows}/cap/apart"] / seconds[f"{windows}/all/apart"], 4)
            for windows in sizes.windows
        },
        "published_cap_saving": PUBLISHED_CAP_SAVING,
        "gradient_distance": max(apart.values()),
        "worst_prediction_error": worst,
        "least_share_of_ideal": least,
        "limits": {
            "prediction_error": MAX_PREDICTION_ERROR,
            "share_of_ideal": MIN_SHARE_OF_IDEAL,
            "gradient_distance": MAX_GRADIENT_DISTANCE,
        },
        "holds": worst <= MAX_PREDICTION_ERROR
        and least >= MIN_SHARE_OF_IDEAL
        and max(apart.values()) <= MAX_GRADIENT_DISTANCE,
    }


def _row(form: MeasuredForm, seconds: float, prices: Sequence[float]) -> dict[str, Any]:
    windows, cap, way = form.name.split("/")
    _, tokens, pairs, targets = form.counts
    predicted = _cost(form.counts, prices)
    return {
        "windows": int(windows),
        "cap": CAP if cap == "cap" else None,
        "prefixes": "once" if way == "once" else "written out",
        "trajectories": sum(len(each.kinds) for each in form.micro_steps),
        "tokens": tokens,
        "pairs": pairs,
        "targets": targets,
        "seconds": round(seconds, 4),
        "predicted_s": round(predicted, 4),
        "error": round(seconds / predicted - 1, 4),
    }


def _saving(
    windows: int, cap: str, forms: Sequence[MeasuredForm], seconds: Mapping[str, float], prices: Sequence[float]
) -> dict[str, Any]:
    """What computing prefixes once saves of a form's time. ``forms``: written out, and once."""
    apart, once = forms
    ideal = 1 - _cost(once.counts, prices) / _cost(apart.counts, prices)
    measured = 1 - seconds[once.name] / seconds[apart.name]
    return {
        "windows": windows,
        "cap": CAP if cap == "cap" else None,
        "ideal": round(ideal, 4),
        "measured": round(measured, 4),
        "share_of_ideal": round(measured / ideal, 4),
    }


def _forms(sizes: TrainingBenchSizes, windows: int) -> list[MeasuredForm]:
    """The four forms of one shape: five trajectories or all, prefixes written out (``apart``) or ``once``."""
    shape = SyntheticShape(tokens=sizes.tokens, calls=sizes.calls, windows=windows, agent_calls=4)
    episodes = []
    for number in range(2):
        name = f"bench/{windows}/{number}"
        records = decode_chain(encoded_episode(name, sizes.seed + number, shape))
        episodes.append(GradedEpisode(name, records, reward=float(number)))
    forms = []
    for cap, limit in (("cap", CAP), ("all", None)):
        config = TrajectoryConfig(cap=limit, token_budget=1 << 30, share_prefixes=True)
        once = [_in_vocabulary(made, sizes.vocab) for made in process_group(episodes, config).micro_steps]
        forms.append(MeasuredForm(f"{windows}/{cap}/once", tuple(once)))
        forms.append(MeasuredForm(f"{windows}/{cap}/apart", tuple(each.unshared() for each in once)))
    return forms


def _in_vocabulary(made: MicroStep, vocab: int) -> MicroStep:
    made.ids[:] %= vocab
    return made


def _known_forms(sizes: TrainingBenchSizes, largest: int) -> list[MeasuredForm]:
    """Trajectories that share nothing, of sizes around those measured, in which tokens, pairs and targets differ."""
    known = (
        (largest, 4, 0.15),
        (largest, 24, 0.15),
        (largest * 2 // 3, 3, 0.15),
        (largest * 2 // 3, 12, 0.4),
        (largest // 3, 2, 0.15),
        (largest // 3, 8, 0.02),
        (largest // 6, 4, 0.15),
    )
    return [
        MeasuredForm(f"known {number}", (_lone(sizes, tokens // count, count, share),))
        for number, (tokens, count, share) in enumerate(known)
    ]


def _lone(sizes: TrainingBenchSizes, length: int, count: int, share: float) -> MicroStep:
    random = np.random.default_rng(length)
    n = length * count
    ends = np.arange(count + 1, dtype=np.int32) * length
    target = random.random(n) < share
    target[ends[:-1]], target[ends[1:] - 1] = False, True
    only_targets = np.where(target, 0, -1).astype(np.int32)
    return MicroStep(
        ids=random.integers(0, sizes.vocab, n).astype(np.int32),
        cu_seqlens=ends,
        prefix_of=np.full(count, -1, np.int32),
        prefix_len=np.zeros(count, np.int32),
        target=target,
        behaviour=np.where(target, -math.log(sizes.vocab), 0).astype(np.float32),
        temperature=np.ones(n, np.float32),
        version=only_targets,
        call=only_targets,
        offset=only_targets,
        advantage=np.ones(count),
        weight=np.full(count, 1 / count),
        episode_index=np.zeros(count, np.int32),
        episodes=("known",),
        kinds=("main",) * count,
    )


def _replica(folder: Path, sizes: TrainingBenchSizes) -> Replica:
    """Of a random policy of the sizes's size."""
    heads = sizes.hidden // 16
    config = {
        "model_type": "qwen3",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": 3 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 16,
        "max_position_embeddings": 1 << 20,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    replica = Replica(folder, OptimizerConfig(kind="sgd"))
    random = torch.Generator().manual_seed(sizes.seed)
    weights = {}
    for name, tensor in replica.weights().items():
        noise = torch.rand(tensor.shape, generator=random)
        weights[name] = noise + 0.5 if tensor.dim() == 1 else (noise - 0.5) * (3 / math.sqrt(sizes.hidden))
    replica.load(weights, 0)
    return replica


def _gradient_distance(replica: Replica, one: MeasuredForm, other: MeasuredForm) -> float:
    """The largest relative difference of a tensor between the gradients of two forms."""
    first, second = (_gradient(replica, form) for form in (one, other))
    norms = {name: float(tensor.double().norm()) for name, tensor in first.items()}
    total = math.hypot(*norms.values())
    if not 0 < total < math.inf:
        raise RuntimeError(f"the gradient of {one.name} has the norm {total}: there is nothing to compare")
    differences = {name: float((second[name].double() - first[name].double()).norm()) for name in first}
    return max(differences[name] / max(norms[name], FLOOR * total) for name in first)


def _gradient(replica: Replica, form: MeasuredForm) -> dict[str, Tensor]:
    replica.begin(0)
    for each in form.micro_steps:
        replica.train(each)
    return replica.gradient()


def _seconds(
    replica: Replica, forms: Sequence[MeasuredForm], reference: MeasuredForm, repetitions: int
) -> dict[str, float]:
    """CPU seconds of each form: the median of what it took relative to the runs of ``reference`` before and after it,
    times the median of these. One repetition beforehand is not measured."""
    taken: dict[str, list[float]] = {form.name: [] for form in forms}
    references = []
    for repetition in range(-1, repetitions):
        before = _once(replica, reference)
        # forwards and backwards in turn: what a form leaves in the caches favours no other
        for form in forms if repetition % 2 else reversed(forms):
            own, after = _once(replica, form), _once(replica, reference)
            if repetition >= 0:
                taken[form.name].append(own / (before + after) * 2)
                references.append(after)
            before = after
    unit = statistics.median(references)
    return {name: unit * statistics.median(relative) for name, relative in taken.items()}


def _keep_freed_memory() -> None:
    """Have glibc keep what is freed. It gives large tensors back to the kernel, which clears their pages anew for the
    next: a cost of no token, which grows with what else the machine does. Elsewhere nothing is changed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_threshold, trim_threshold = -3, -1  # malloc.h
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)


def _once(replica: Replica, form: MeasuredForm) -> float:
    replica.begin(0)
    began = time.process_time()
    for each in form.micro_steps:
        replica.train(each)
    return time.process_time() - began


def _cost(counts: Sequence[int], prices: Sequence[float]) -> float:
    return sum(count * price for count, price in zip(counts, prices, strict=True))


def _fitted(known: Sequence[tuple[Sequence[int], float]]) -> list[float]:
    """Non-negative prices with the least relative errors.

    Least squares; a price that comes out negative is set to zero and the others are fitted again.
    """
    rows = np.array([[count / seconds for count in counts] for counts, seconds in known])
    kept = list(range(rows.shape[1]))
    while True:
        scale = rows[:, kept].max(axis=0)
        solved = np.linalg.lstsq(rows[:, kept] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if (solved >= 0).all():
            break
        kept.pop(int(np.argmin(solved * scale)))
    prices = [0.0] * rows.shape[1]
    for index, price in zip(kept, solved.tolist(), strict=True):
        prices[index] = price
    return prices
