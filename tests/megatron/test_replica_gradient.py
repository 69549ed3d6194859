"""One replica's gradient sum, its update, and its way through a candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from infra.megatron.checkpoint import (
    CandidateFacts,
    initial_candidate,
    load_candidate,
    load_optimizer,
    load_weights,
    read_policy,
    save_candidate,
)
from infra.megatron.model.weights import WeightsError
from infra.megatron.replay import recompute_gradient
from infra.megatron.replica import Replica, TrainingError
from infra.state.blobs import BlobStore
from trajectory.config import LossConfig, OptimizerConfig
from trajectory.micro_step import MicroStep

Tensors = dict[str, torch.Tensor]
Pack = Callable[[Sequence[Any]], MicroStep]
SGD = OptimizerConfig(kind="sgd", lr=0.1, clip_grad=0.0)
ADAMW = OptimizerConfig(lr=1e-3, weight_decay=0.1)


def distance(one: Tensors, two: Tensors) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).norm() / one[name].norm().clamp(min=1e-12)) for name in one)


def summed(replica: Replica, micro_steps: Sequence[MicroStep]) -> Tensors:
    replica.begin(0)
    for micro_step in micro_steps:
        replica.train(micro_step)
    return replica.gradient()


@pytest.fixture(scope="module")
def replica(policy_dir: Path) -> Replica:
    made = Replica(policy_dir, SGD)
    made.load(read_policy(policy_dir), 0)
    return made


@pytest.fixture(scope="module")
def whole(replica: Replica, trajectories: list[Any], pack_trajectories: Pack) -> Tensors:
    return summed(replica, [pack_trajectories(trajectories)])


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shuffle=st.tuples(st.permutations(range(12)), st.sets(st.integers(1, 11), max_size=5)))
def test_any_cut_and_order_of_the_batch_gives_the_same_gradient(
    shuffle: tuple[list[int], set[int]],
    replica: Replica,
    whole: Tensors,
    trajectories: list[Any],
    pack_trajectories: Pack,
) -> None:
    order, cuts = shuffle
    bounds = [0, *sorted(cuts), 12]
    packs = [[trajectories[i] for i in order[a:b]] for a, b in pairwise(bounds)]
    assert distance(whole, summed(replica, [pack_trajectories(some) for some in packs])) < 1e-5


def test_the_same_micro_steps_give_the_same_bits(
    replica: Replica, trajectories: list[Any], pack_trajectories: Pack
) -> None:
    micro_steps = [pack_trajectories(trajectories[:5]), pack_trajectories(trajectories[5:])]
    one, two = summed(replica, micro_steps), summed(replica, micro_steps)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_two_replicas_sums_added_make_the_sgd_update_of_one(
    policy_dir: Path, trajectories: list[Any], pack_trajectories: Pack
) -> None:
    micro_steps = [pack_trajectories(trajectories[i : i + 3]) for i in range(0, 12, 3)]
    one, core, satellite = (Replica(policy_dir, SGD) for _ in range(3))
    for each in (one, core, satellite):
        each.load(read_policy(policy_dir), 0)
    summed(one, micro_steps)
    expected_norm = one.update(5)
    contribution = summed(satellite, micro_steps[1:3])
    summed(core, [micro_steps[3], micro_steps[0]])
    core.add_gradient(contribution)
    assert core.update(5) == pytest.approx(expected_norm, rel=1e-5)
    assert core.version == 1
    assert distance(one.weights(), core.weights()) < 1e-5


def test_the_sum_is_divided_once_and_clipped_after_that(
    policy_dir: Path, whole: Tensors, trajectories: list[Any], pack_trajectories: Pack
) -> None:
    before = read_policy(policy_dir)
    norm = float(torch.cat([tensor.flatten() for tensor in whole.values()]).norm())
    for clip, expected in ((0.0, 0.1 * norm / 7), (norm / 70, 0.1 * norm / 70)):
        trained = Replica(policy_dir, SGD.model_copy(update={"clip_grad": clip}))
        trained.load(before, 0)
        summed(trained, [pack_trajectories(trajectories)])
        assert trained.update(7) == pytest.approx(norm / 7, rel=1e-5)
        after = trained.weights()
        moved = torch.cat([(after[name] - before[name]).flatten() for name in before]).norm()
        assert float(moved) == pytest.approx(expected, rel=1e-3)


def test_adamw_state_that_went_through_a_candidate_makes_the_identical_next_update(
    policy_dir: Path, tmp_path: Path, trajectories: list[Any], pack_trajectories: Pack
) -> None:
    blobs = BlobStore(str(tmp_path))
    original = Replica(policy_dir, ADAMW)
    base = load_candidate(blobs, initial_candidate(blobs, "r", policy_dir))
    original.load(load_weights(blobs, base), 0)
    original.load_optimizer(load_optimizer(blobs, base))
    summed(original, [pack_trajectories(trajectories[:6])])
    norm = original.update(3)
    facts = CandidateFacts(
        run="r",
        step=0,
        version=1,
        base_version=0,
        base_ref="sha256:",
        micro_steps=(),
        claims={},
        normaliser=3,
        grad_norm=norm,
        optimizer=ADAMW,
        loss=LossConfig(),
    )
    ref = save_candidate(blobs, facts, original.weights(), original.optimizer_tensors())

    restored = Replica(policy_dir, ADAMW)
    candidate = load_candidate(blobs, ref)
    restored.load(load_weights(blobs, candidate), candidate.version)
    restored.load_optimizer(load_optimizer(blobs, candidate))
    for each in (original, restored):
        summed(each, [pack_trajectories(trajectories[6:])])
        each.update(3)
    one, two = original.weights(), restored.weights()
    assert all(torch.equal(one[name], two[name]) for name in one)
    state, again = original.optimizer_tensors(), restored.optimizer_tensors()
    assert float(state["step"]) == 2
    assert all(torch.equal(state[name], again[name]) for name in state)


def test_norm_weights_are_never_decayed(policy_dir: Path) -> None:
    decayed = Replica(policy_dir, ADAMW)
    rates = {
        parameter.dim(): group["weight_decay"]
        for group in decayed._optimizer.optimizer.param_groups
        for parameter in group["params"]
    }
    assert rates == {1: 0.0, 2: 0.1}


def test_a_step_without_any_gradient_makes_a_version_but_no_optimizer_step(policy_dir: Path) -> None:
    idle = Replica(policy_dir, ADAMW)
    before = read_policy(policy_dir)
    idle.load(before, 4)
    idle.begin(9)
    assert idle.update(16) == 0.0
    assert idle.version == 5
    assert all(torch.equal(tensor, before[name]) for name, tensor in idle.weights().items())
    assert idle.optimizer_tensors() == {}


def test_a_loss_that_is_not_finite_leaves_the_sum_as_it_was(
    replica: Replica, trajectories: list[Any], pack_trajectories: Pack
) -> None:
    good = pack_trajectories(trajectories[:3])
    before = summed(replica, [good])
    with pytest.raises(TrainingError, match="nan"):
        replica.train(replace(good, advantage=np.full(3, np.nan)))
    after = replica.gradient()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_sum_of_another_policy_is_refused_and_the_own_sum_survives(
    replica: Replica, trajectories: list[Any], pack_trajectories: Pack
) -> None:
    before = summed(replica, [pack_trajectories(trajectories[:3])])
    strange = dict(before)
    del strange["model.norm.weight"]
    with pytest.raises(WeightsError):
        replica.combine([before, strange], 1, record=False)
    after = replica.gradient()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_loading_weights_keeps_the_gradient_sum(
    replica: Replica, policy_dir: Path, trajectories: list[Any], pack_trajectories: Pack
) -> None:
    before = summed(replica, [pack_trajectories(trajectories[:3])])
    own = replica.weights()
    replica.load({name: tensor + 1 for name, tensor in own.items()}, 7)
    after = replica.gradient()
    replica.load(own, 0)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_training_outside_of_a_step_is_refused(
    policy_dir: Path, trajectories: list[Any], pack_trajectories: Pack
) -> None:
    idle = Replica(policy_dir, SGD)
    with pytest.raises(TrainingError, match="no step"):
        idle.train(pack_trajectories(trajectories[:1]))
    with pytest.raises(TrainingError, match="no step"):
        idle.update(1)


def test_version_0_is_the_policy_as_stored_and_has_no_gradient_to_replay(policy_dir: Path, tmp_path: Path) -> None:
    blobs = BlobStore(str(tmp_path))
    ref = initial_candidate(blobs, "r", policy_dir)
    assert ref == initial_candidate(blobs, "r", policy_dir)
    manifest = load_candidate(blobs, ref)
    stored = load((policy_dir / "model.safetensors").read_bytes())
    weights = load_weights(blobs, manifest)
    assert all(torch.equal(weights[name], stored[name]) for name in weights)
    with pytest.raises(ValueError, match="no recorded gradient"):
        recompute_gradient(ref, blobs, policy_dir)
