"""`bench trajectory`, its first half: how fast a step's call records become micro-steps, and in how much memory.

The episodes of a step are made group by group (``tests.bench.synthetic_episodes``), encoded as they lie in the store,
and handed to a process that does nothing else (``tests.bench.group_process``). It knows nothing of training.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from tests.bench.synthetic_episodes import SyntheticShape, encoded_episode
from workers.errors import UsageError

TOKENS_PER_CPU_S = 8e6
"""Unique tokens per CPU-second, at least."""
COLUMNS = 4.0
"""Resident memory at most, as a multiple of the largest group's columns."""
FULL = 512
"""Episodes of a whole step."""
SMALL = 6
"""Episodes of a run of seconds, all in one group."""


class TrajectoryBenchSizes(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    episodes: int = Field(default=16, ge=2)
    group_size: int = Field(default=8, ge=2)
    tokens: int = Field(default=700_000, ge=20_000)
    """Unique tokens of an episode, about."""
    token_budget: int = Field(default=262_144, ge=1)
    """Tokens of a micro-step."""
    cap: int | None = 5
    seed: int = 0


def measure(sizes: TrajectoryBenchSizes) -> dict[str, Any]:
    """Rates over all groups, and whether the limits hold. Raises UsageError when the measured process fails."""
    groups = [
        range(first, min(first + sizes.group_size, sizes.episodes))
        for first in range(0, sizes.episodes, sizes.group_size)
    ]
    shape = SyntheticShape(tokens=sizes.tokens)
    order = {"trajectory": {"cap": sizes.cap, "token_budget": sizes.token_budget, "share_prefixes": True}}
    results = []
    command = [sys.executable, "-m", "tests.bench.group_process"]
    with (
        tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        if process.stdin is None or process.stdout is None:
            raise UsageError("the measured process has no pipes")
        for group in groups:
            names = {f"bench/000000/g/{group[0]:03d}/{i:03d}": sizes.seed + i for i in group}
            encoded = {name: encoded_episode(name, seed, shape) for name, seed in names.items()}
            file = Path(folder) / "group"
            file.write_bytes(msgspec.msgpack.encode(encoded))
            del encoded
            process.stdin.write(json.dumps({**order, "file": str(file)}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise UsageError("the measured process ended before its time: see above")
            results.append(json.loads(line))
        process.stdin.close()
    return _summed(sizes, results)


def _summed(sizes: TrajectoryBenchSizes, results: list[dict[str, Any]]) -> dict[str, Any]:
    sums = {name: sum(r[name] for r in results) for name in results[0] if name not in ("resident_bytes",)}
    rate = sums["unique_tokens"] / sums["cpu_s"]
    resident, largest = max(r["resident_bytes"] for r in results), max(r["columns_bytes"] for r in results)
    return {
        "plan": sizes.model_dump(),
        **{name: round(value, 4) for name, value in sums.items()},
        "tokens_per_cpu_s": round(rate),
        "tokens_per_cpu_s_with_bytes": round(sums["unique_tokens"] / (sums["cpu_s"] + sums["to_bytes_cpu_s"])),
        "limit_tokens_per_cpu_s": TOKENS_PER_CPU_S,
        "resident_bytes": resident,
        "largest_group_columns_bytes": largest,
        "resident_in_columns": round(resident / largest, 3),
        "limit_resident_in_columns": COLUMNS,
        "holds": rate >= TOKENS_PER_CPU_S and resident <= COLUMNS * largest,
    }


def describe(result: dict[str, Any]) -> str:
    """The first half in lines for people."""
    return "\n".join(
        [
            f"{result['episodes']} episodes, {result['calls']} calls, {result['unique_tokens']:,} unique tokens: "
            f"{result['micro_steps']} micro-steps of {result['packed_tokens']:,} tokens, of which "
            f"{result['recomputed_tokens']:,} are computed again because of the budget of "
            f"{result['plan']['token_budget']:,}",
            f"encoded records to micro-steps: {result['cpu_s']:.2f} s of CPU, "
            f"{result['tokens_per_cpu_s'] / 1e6:.1f} M unique tokens per CPU-second "
            f"(limit {result['limit_tokens_per_cpu_s'] / 1e6:.0f} M); their bytes written too: "
            f"{result['tokens_per_cpu_s_with_bytes'] / 1e6:.1f} M",
            f"resident memory: {result['resident_bytes'] / 1e6:.0f} MB, {result['resident_in_columns']:.2f} × the "
            f"largest group's columns (limit {result['limit_resident_in_columns']:.0f} ×)",
        ]
    )


def describe_training(result: dict[str, Any]) -> str:
    """The second half (``tests.bench.training``) in lines for people."""
    limits = result["limits"]
    lines = [
        f"{row['windows']} windows, {_cap(row)}, prefixes {row['prefixes']}: {row['tokens']:,} tokens in "
        f"{row['seconds']:.3f} s, {row['error']:+.1%} from the {row['predicted_s']:.3f} s that they predict"
        for row in result["rows"]
    ]
    lines += [
        f"{saving['windows']} windows, {_cap(saving)}: computing prefixes once saves {saving['measured']:.1%}, "
        f"{saving['share_of_ideal']:.0%} of the ideal {saving['ideal']:.1%}"
        for saving in result["compute_once"]
    ]
    saved = ", ".join(f"{share:.1%} with {windows} windows" for windows, share in result["cap_saving"].items())
    return "\n".join(
        [
            *lines,
            f"the cap of five saves {saved} (published: {result['published_cap_saving']:.1%})",
            f"largest distance from the prediction {result['worst_prediction_error']:.1%} (limit "
            f"{limits['prediction_error']:.0%}), least share of the ideal {result['least_share_of_ideal']:.0%} (limit "
            f"{limits['share_of_ideal']:.0%}), distance of gradients {result['gradient_distance']:.1e} (limit "
            f"{limits['gradient_distance']:.0e})",
        ]
    )


def _cap(row: dict[str, Any]) -> str:
    return "no cap" if row["cap"] is None else f"cap of {row['cap']}"
