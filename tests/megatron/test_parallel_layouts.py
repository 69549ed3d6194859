"""Which parallel layout a replica has changes neither its gradient nor its update, and a wrong sum over ranks does.

Two processes train the same micro-steps, with prefixes shared and of unequal sizes, under one layout after the other;
what they sum is compared by Hugging Face name with what one process sums alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_ranks import RANKS, Job
from safetensors.torch import load_file
from tree_parts import distance, random_tree

from infra.megatron.checkpoint import read_policy
from infra.megatron.model.layout import Layout, RankPlace, UnsupportedLayout
from infra.megatron.model.model import check_layout
from infra.megatron.model.shape import PolicyShape, read_shape
from infra.megatron.replica import Replica
from trajectory.config import OptimizerConfig

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 100
MICRO_STEPS = [random_tree(seed, trajectories=6, longest=30) for seed in range(4)]

LAYOUTS = {
    "cp2": {"cp": 2},
    "tp2": {"tp": 2},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "ep2": {"dp": 2, "ep": 2},
}
RIGHT = [
    ("cp2", "policy_dir"),
    ("cp2", "untied_policy_dir"),
    ("cp2", "expert_policy_dir"),
    ("tp2", "policy_dir"),
    ("tp2", "untied_policy_dir"),
    ("dp2", "policy_dir"),
    ("pp2", "policy_dir"),
    ("pp2", "untied_policy_dir"),
    ("pp2", "expert_policy_dir"),
    ("ep2", "expert_policy_dir"),
]
WRONG = [
    ("cp2", "loss_counted_once_per_rank"),
    ("cp2", "keys_of_others_without_gradient"),
    ("cp2", "nothing_summed_over_ranks"),
    ("tp2", "nothing_summed_over_ranks"),
    ("tp2", "sums_over_ranks_twice"),
    ("dp2", "nothing_summed_over_ranks"),
    ("dp2", "sums_over_ranks_twice"),
    ("pp2", "nothing_summed_over_ranks"),
    ("pp2", "stage_gradient_doubled"),
    ("ep2", "nothing_summed_over_ranks"),
]
"""What ``layout_ranks`` breaks under a layout."""


@dataclass(frozen=True)
class Sums:
    gradient: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    norm: float
    targets: int
    deltas: float


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Of all that two ranks made of all jobs."""
    made = tmp_path_factory.mktemp("layouts")
    names = [f"{number}.micro_step" for number in range(len(MICRO_STEPS))]
    for name, micro_step in zip(names, MICRO_STEPS, strict=True):
        (made / name).write_bytes(micro_step.to_bytes())

    def job(layout: str, policy: str, name: str, mutation: str = "") -> dict[str, Any]:
        return asdict(Job(name, str(request.getfixturevalue(policy)), LAYOUTS[layout], names, mutation))

    jobs = [job(layout, policy, f"{layout}-{policy}") for layout, policy in RIGHT]
    for layout, mutation in WRONG:
        policy = "expert_policy_dir" if layout == "ep2" else "policy_dir"
        jobs.append(job(layout, policy, f"{layout}-{mutation}", mutation))
    (made / "jobs.json").write_text(json.dumps(jobs))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    script = Path(__file__).with_name("layout_ranks.py")
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(made)], env=environment) for rank in range(RANKS)
    ]
    try:
        assert [rank.wait(TIMEOUT_S) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return made


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> dict[str, Sums]:
    """What one process sums, by policy."""
    made = {}
    for policy in sorted({policy for _, policy in RIGHT}):
        where = request.getfixturevalue(policy)
        replica = Replica(where, OptimizerConfig(kind="sgd", lr=0.1, clip_grad=0.05))
        replica.load(read_policy(where), 0)
        replica.begin(0)
        stats = [replica.train(micro_step) for micro_step in MICRO_STEPS]
        gradient = replica.gradient()
        replica.add_gradient(gradient)
        norm = replica.update(7.0)
        made[policy] = Sums(gradient, replica.weights(), norm, *totals(stats))
    return made


def totals(stats: list[dict[str, Any]]) -> tuple[int, float]:
    counts: Counter[str] = Counter()
    for each in stats:
        counts.update({"targets": each["targets"], "deltas": each["sum_abs_delta"]})
    return counts["targets"], float(counts["deltas"])


@pytest.mark.parametrize(("layout", "policy"), RIGHT)
def test_two_ranks_sum_the_gradient_and_make_the_update_of_one(
    layout: str, policy: str, folder: Path, alone: dict[str, Sums]
) -> None:
    name, reference = f"{layout}-{policy}", alone[policy]
    assert distance(reference.gradient, load_file(folder / f"{name}.gradient")) < 1e-5
    # the gradient is clipped to a small part of its norm: a norm that counts a tensor twice or not at all would show
    assert reference.norm > 1
    before = read_policy(Path(json.loads((folder / "jobs.json").read_text())[RIGHT.index((layout, policy))]["policy"]))
    moved = {key: reference.weights[key] - before[key] for key in before}
    weights = load_file(folder / f"{name}.weights")
    assert distance(moved, {key: weights[key] - before[key] for key in before}) < 1e-3  # fp32 weights, small moves
    results = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(RANKS)]
    assert [result["norm"] for result in results] == pytest.approx([reference.norm] * RANKS, rel=1e-5)
    stats = [result["stats"] for result in results]
    if "dp" in LAYOUTS[layout]:
        stats = [stats[0] + stats[1]]
    for each in stats:
        assert totals(each) == pytest.approx((reference.targets, reference.deltas), rel=1e-5)


@pytest.mark.parametrize(("layout", "mutation"), WRONG)
def test_a_missing_or_doubled_sum_over_ranks_is_noticed(
    layout: str, mutation: str, folder: Path, alone: dict[str, Sums]
) -> None:
    reference = alone["expert_policy_dir" if layout == "ep2" else "policy_dir"]
    assert distance(reference.gradient, load_file(folder / f"{layout}-{mutation}.gradient")) > 1e-2


@pytest.mark.parametrize(
    ("sizes", "named"),
    [({"tp": 3}, "160 vocabulary"), ({"tp": 4}, "2 key/value heads"), ({"pp": 3}, "2 layers")],
)
def test_a_layout_that_does_not_divide_the_policy_is_refused_by_name(
    sizes: dict[str, int], named: str, policy_dir: Path
) -> None:
    with pytest.raises(UnsupportedLayout, match=named):
        check_layout(read_shape(policy_dir), in_layout(sizes))


def test_a_layout_that_fits_no_experts_is_refused(policy_dir: Path, expert_policy_dir: Path) -> None:
    refused: list[tuple[PolicyShape, dict[str, int]]] = [
        (read_shape(policy_dir), {"dp": 2, "ep": 2}),
        (read_shape(expert_policy_dir), {"dp": 8, "ep": 8}),
        (read_shape(expert_policy_dir), {"tp": 2}),
    ]
    for shape, sizes in refused:
        with pytest.raises(UnsupportedLayout):
            check_layout(shape, in_layout(sizes))
    for sizes in ({"ep": 2}, {"dp": 0}, {"dp": 2, "ep": 2, "tp": 2}):
        with pytest.raises(UnsupportedLayout):
            Layout(**sizes)


def in_layout(sizes: dict[str, int]) -> RankPlace:
    return RankPlace(Layout(**sizes), 0, 0, 0, 0)
