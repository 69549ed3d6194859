"""`bench trajectory` at a reduced size, and the episodes that it is made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.bench.synthetic_episodes import SyntheticShape, encoded_episode
from trajectory.config import TrajectoryConfig
from trajectory.episode import GradedEpisode
from trajectory.kinds import classify
from trajectory.process import process_group
from trajectory.records import decode_chain
from trajectory.tree import EpisodeTree
from trajectory.verify import verify_provenance

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("windows", [3, 4, 6])
def test_a_synthetic_episode_has_its_windows_summaries_and_sub_agents(windows: int) -> None:
    shape = SyntheticShape(tokens=30_000, calls=120, windows=windows)
    data = encoded_episode("e", 3, shape)
    assert data == encoded_episode("e", 3, shape) != encoded_episode("e", 4, shape)
    records = decode_chain(data)
    kinds = Counter(str(leaf.kind) for leaf in classify(records))
    assert kinds == {"main": windows, "main_summary": windows - 1, "sub_agent": 4}
    assert 0.75 * shape.calls < len(records) < 1.25 * shape.calls
    tree = EpisodeTree.from_records(records)
    assert 0.75 * shape.tokens < len(tree.ids) < 1.25 * shape.tokens
    assert tree.duplicates == 0


def test_every_target_of_a_synthetic_group_is_proven() -> None:
    shape = SyntheticShape(tokens=30_000, calls=120)
    records = {f"e{i}": decode_chain(encoded_episode(f"e{i}", i, shape)) for i in range(4)}
    episodes = [GradedEpisode(name, of, float(i % 2)) for i, (name, of) in enumerate(records.items())]
    done = process_group(episodes, TrajectoryConfig(token_budget=20_000, share_prefixes=True))
    assert verify_provenance(done.micro_steps, records).targets == done.stats.trained_tokens
    assert done.recomputed_tokens > 0


def test_the_processor_holds_its_limits_at_a_reduced_size() -> None:
    command = [sys.executable, "-m", "tests.bench", "trajectory", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*command, "--episodes", "6", "--group-size", "4", "--no-training"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stderr
    processor = json.loads(ended.stdout)["processor"]
    assert processor["episodes"] == 6
    assert processor["unique_tokens"] > 6 * 500_000
    assert processor["packed_tokens"] >= processor["trained_tokens"] > 0
    assert processor["resident_in_columns"] <= processor["limit_resident_in_columns"], processor
    # CPU time is also the machine's: where tests run beside each other a token costs up to twice as much
    assert processor["tokens_per_cpu_s"] >= processor["limit_tokens_per_cpu_s"] / 2, processor
    assert processor["holds"] == (ended.returncode == 0)
