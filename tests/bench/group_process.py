"""The measured process of `bench trajectory`: encoded records of one group after another into micro-steps.

Reads JSON lines on standard input, each naming a file of a group's records; answers each with a line of what it took.
Reading the file is not counted, decoding and checking the chain are. The memory is the process's own: nothing else
runs in it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trajectory.config import TrajectoryConfig
from trajectory.episode import GradedEpisode
from trajectory.process import process_group
from trajectory.records import decode_chain
from trajectory.tree import EpisodeTree


def resident(field: str) -> int:
    """Bytes that the kernel says this process holds: ``VmRSS`` now, ``VmHWM`` at most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not tell {field}")


def columns(tree: EpisodeTree) -> int:
    """Bytes of a tree's columns."""
    held = (getattr(tree, field.name) for field in fields(tree))
    return sum(column.nbytes for column in held if isinstance(column, np.ndarray))


def measure(encoded: dict[str, list[bytes]], config: TrajectoryConfig) -> dict[str, Any]:
    """One group: CPU seconds from encoded records to packed micro-steps, and from those to bytes."""
    begin = time.process_time()
    episodes = []
    for position, (name, data) in enumerate(encoded.items()):
        records = decode_chain(data)
        tree = EpisodeTree.from_records(records)
        episodes.append(GradedEpisode(name, records, float(position % 2), tree))
    done = process_group(episodes, config)
    packed = time.process_time()
    size = sum(len(micro_step.to_bytes()) for micro_step in done.micro_steps)
    written = time.process_time()
    trees = [episode.tree for episode in episodes if episode.tree is not None]
    return {
        "episodes": len(episodes),
        "calls": sum(len(episode.records) for episode in episodes),
        "unique_tokens": sum(len(tree.ids) for tree in trees),
        "columns_bytes": sum(columns(tree) for tree in trees),
        "cpu_s": packed - begin,
        "to_bytes_cpu_s": written - packed,
        "micro_steps": len(done.micro_steps),
        "micro_step_bytes": size,
        "packed_tokens": done.stats.packed_tokens,
        "recomputed_tokens": done.recomputed_tokens,
        "trained_tokens": done.stats.trained_tokens,
    }


def main() -> None:
    before = resident("VmRSS")
    for line in sys.stdin:
        order = json.loads(line)
        encoded = msgspec.msgpack.decode(Path(order["file"]).read_bytes(), type=dict[str, list[bytes]])
        result = measure(encoded, TrajectoryConfig.model_validate(order["trajectory"]))
        print(json.dumps({**result, "resident_bytes": resident("VmHWM") - before}), flush=True)


if __name__ == "__main__":
    main()
