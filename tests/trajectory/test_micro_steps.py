"""From a group to micro-steps: advantages, weights, packing, bytes and provenance."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from trajectory_reference import Script, advantages, groups, has_gradient, random_script, samplers, selection

from trajectory.advantage import ADVANTAGES, group_advantage
from trajectory.config import TrajectoryConfig
from trajectory.episode import GradedEpisode
from trajectory.micro_step import MicroStep, MicroStepError
from trajectory.process import GroupStats, process_group
from trajectory.records import CallRecord, RecordError
from trajectory.verify import ProvenanceError, verify_provenance

configs = st.builds(
    TrajectoryConfig,
    cap=st.sampled_from([1, 2, 5, None]),
    reduction=st.sampled_from(["episode_tokens", "episode_trajectories"]),
    draw=st.sampled_from(["seeded", "chronological", "longest"]),
    share_prefixes=st.booleans(),
    token_budget=st.sampled_from([1, 9, 40, 8192]),
)


def example_group(seed: int = 7) -> list[GradedEpisode]:
    names = [f"run/step/000001/g/000/e/{i:02d}" for i in range(4)]
    scripts = [random_script(random.Random(seed + i), name, 8) for i, name in enumerate(names)]
    return [GradedEpisode(s.episode, s.records, float(i % 2)) for i, s in enumerate(scripts)]


def _records(group: list[GradedEpisode]) -> dict[str, Sequence[CallRecord]]:
    return {e.episode: e.records for e in group}


# --- advantages


def test_advantages_are_normalised_over_valid_episodes_only() -> None:
    outcome = group_advantage([1.0, None, 0.0, 0.0], [3, 3, 3, 3])
    mean, std = 1 / 3, (2 / 9) ** 0.5
    high, low = (1 - mean) / (std + 1e-6), -mean / (std + 1e-6)
    assert outcome.advantages[1] is None
    assert [a for a in outcome.advantages if a is not None] == pytest.approx([high, low, low], rel=1e-14)
    assert outcome.mean_reward == pytest.approx(mean)
    assert outcome.reason == ""


@pytest.mark.parametrize(
    ("rewards", "targets", "reason"),
    [
        ([], [], "too_few"),
        ([None, None], [1, 1], "too_few"),
        ([1.0, None], [1, 1], "too_few"),
        ([0.5, 0.50009], [1, 1], "no_variance"),
        ([0.0, 1.0, None], [0, 0, 5], "no_tokens"),
        ([0.5, 0.5002], [1, 0], ""),
    ],
)
def test_a_group_without_gradient_says_why(rewards: list[float | None], targets: list[int], reason: str) -> None:
    outcome = group_advantage(rewards, targets)
    assert outcome.reason == reason
    assert not reason or set(outcome.advantages) <= {None}


@pytest.mark.parametrize("reward", [-0.1, 1.1, float("nan")])
def test_a_reward_outside_of_its_range_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="not in \\[0, 1\\]"):
        group_advantage([reward, 0.0], [1, 1])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=2, max_size=8),
    st.sampled_from([*ADVANTAGES]),
)
def test_every_rule_of_advantage_is_its_formula(rewards: list[float | None], rule: str) -> None:
    outcome = group_advantage(rewards, [1] * len(rewards), rule)
    assume(not outcome.reason)
    for found, expected in zip(outcome.advantages, advantages(rewards, rule), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_the_advantages_of_two_episodes_by_each_rule() -> None:
    found = {rule: group_advantage([1.0, 0.0, None], [1, 1, 1], rule).advantages for rule in ADVANTAGES}
    assert found["group"] == (0.5 / (0.5 + 1e-6), -0.5 / (0.5 + 1e-6), None)
    assert found["leave_one_out"] == (1.0, -1.0, None)
    assert found["mean_only"] == (0.5, -0.5, None)


def test_episodes_without_gradient_count_in_the_normaliser() -> None:
    script = Script()
    script.call([1], [5, 6, 7])
    other = Script("e1")
    other.call([1], [8])
    group = [GradedEpisode("e0", script.records, 1.0), GradedEpisode("e1", other.records, 1.0)]
    for reduction, expected in (("episode_tokens", 2), ("episode_trajectories", 2), ("tokens", 4)):
        done = process_group(group, TrajectoryConfig(reduction=reduction))
        assert (done.stats.reason, done.micro_steps, done.normaliser) == ("no_variance", [], expected)


# --- groups


@settings(max_examples=300, deadline=None)
@given(groups(), configs)
def test_micro_steps_carry_the_group_and_nothing_else(group: list[GradedEpisode], config: TrajectoryConfig) -> None:
    done = process_group(group, config)
    stats = done.stats
    assert bool(done.micro_steps) == has_gradient(group) == (stats.reason == "")
    assert stats.valid_episodes + stats.excluded_episodes == len(group)
    assert GroupStats.model_validate_json(stats.model_dump_json()) == stats
    assert stats.active_s == 0.5 * sum(len(e.records) for e in group)
    valid = [e for e in group if e.reward is not None]
    assert stats.sampled_tokens == sum(len(samplers(e.records)[0]) for e in valid)
    assert stats.duplicates == sum(samplers(e.records)[1] for e in valid)
    assert stats.packed_tokens == sum(m.tokens for m in done.micro_steps)
    assert stats.trained_tokens == sum(m.targets for m in done.micro_steps)
    if not done.micro_steps:
        return
    assert stats.trained_tokens == stats.sampled_tokens - sum(stats.left_out.values())
    assert sum(stats.trajectories.values()) == sum(len(m.kinds) for m in done.micro_steps)
    assert all(stats.left_out[kind] <= stats.sampled_by_kind[kind] for kind in stats.left_out)

    weights: dict[str, float] = {}
    for m in done.micro_steps:
        assert len(m.kinds) == 1 or m.tokens <= config.token_budget
        for i, weight in zip(m.episode_index, m.weight, strict=True):
            weights[m.episodes[i]] = weights.get(m.episodes[i], 0.0) + float(weight)
    trained = {e.episode for e in valid if selection(e.episode, e.records, config.cap, config.draw)}
    assert weights == pytest.approx(dict.fromkeys(trained, 1.0), abs=1e-12)
    expected = dict(zip((e.episode for e in group), advantages([e.reward for e in group]), strict=True))
    for m in done.micro_steps:
        assert m.advantage.tolist() == pytest.approx([expected[m.episodes[i]] for i in m.episode_index], rel=1e-12)
    versions = np.concatenate([m.version[m.target] for m in done.micro_steps])
    assert (stats.oldest_version, stats.newest_version) == (versions.min(), versions.max())
    assert sum(stats.trained_by_version.values()) == stats.trained_tokens


@settings(max_examples=100, deadline=None)
@given(groups(), configs, st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_no_byte(
    group: list[GradedEpisode], config: TrajectoryConfig, rng: random.Random
) -> None:
    shuffled = rng.sample(group, len(group))
    one, other = process_group(group, config), process_group(shuffled, config)
    assert [m.to_bytes() for m in one.micro_steps] == [m.to_bytes() for m in other.micro_steps]
    assert one.stats == other.stats


def test_an_excluded_episode_is_not_examined_and_a_broken_valid_one_is_named() -> None:
    group = example_group()
    broken = dataclasses.replace(group[2], records=group[2].records[1:])
    with pytest.raises(RecordError, match=broken.episode):
        process_group([*group[:2], broken], TrajectoryConfig())
    done = process_group([*group[:2], dataclasses.replace(broken, reward=None)], TrajectoryConfig())
    assert done.stats.excluded_episodes == 1
    assert done.micro_steps


def test_an_episode_given_twice_is_refused() -> None:
    group = example_group()
    with pytest.raises(ValueError, match="twice"):
        process_group([group[0], *group], TrajectoryConfig())


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ValidationError):
        TrajectoryConfig.model_validate({"budget": 3})
    with pytest.raises(ValidationError):
        TrajectoryConfig(cap=0)
    for name in ("advantage", "reduction", "draw"):
        with pytest.raises(ValidationError, match="'best' is none of"):
            TrajectoryConfig.model_validate({name: "best"})
    for reserve in ({"cap": None, "summary_reserve": 1}, {"cap": 2, "summary_reserve": 3}):
        with pytest.raises(ValidationError, match="not part of a cap"):
            TrajectoryConfig.model_validate(reserve)


# --- bytes


@settings(max_examples=100, deadline=None)
@given(groups(), configs)
def test_a_micro_step_survives_its_bytes(group: list[GradedEpisode], config: TrajectoryConfig) -> None:
    for micro_step in process_group(group, config).micro_steps:
        data = micro_step.to_bytes()
        again = MicroStep.from_bytes(data)
        assert again.to_bytes() == data
        for field in dataclasses.fields(MicroStep):
            one, other = getattr(micro_step, field.name), getattr(again, field.name)
            assert np.array_equal(one, other)


def example_digest() -> str:
    """Digest of the example's micro-steps; also run in other processes."""
    done = process_group(example_group(), TrajectoryConfig(token_budget=40))
    return hashlib.sha256(b"".join(m.to_bytes() for m in done.micro_steps)).hexdigest()


def test_every_process_writes_the_same_bytes() -> None:
    root = Path(__file__).parents[2]
    code = "import test_micro_steps; print(test_micro_steps.example_digest())"
    digests = {example_digest()}
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{root}{os.pathsep}{Path(__file__).parent}"}
        run = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True
        )
        digests.add(run.stdout.strip())
    assert len(digests) == 1


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x00" * 64])
def test_bytes_that_are_no_micro_step_are_refused(data: bytes) -> None:
    with pytest.raises(MicroStepError):
        MicroStep.from_bytes(data)


def _example() -> MicroStep:
    return process_group(example_group(), TrajectoryConfig()).micro_steps[0]


def test_a_damaged_file_is_refused() -> None:
    data = _example().to_bytes()
    with pytest.raises(MicroStepError):
        MicroStep.from_bytes(data[:-1])
    with pytest.raises(MicroStepError):
        MicroStep.from_bytes(data.replace(b"temperature", b"temperatuer"))


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("ids", lambda c: c[:-1]),
        ("behaviour", lambda c: c.astype(np.float64)),
        ("cu_seqlens", lambda c: c + 1),
        ("target", np.ones_like),
        ("target", np.zeros_like),
        ("episode_index", lambda c: c + 99),
    ],
)
def test_columns_that_do_not_fit_are_refused(column: str, change: Callable[[Any], Any]) -> None:
    example = _example()
    with pytest.raises(MicroStepError):
        dataclasses.replace(example, **{column: change(getattr(example, column))})


# --- provenance


@settings(max_examples=150, deadline=None)
@given(groups(), configs)
def test_every_target_is_one_position_of_one_record(group: list[GradedEpisode], config: TrajectoryConfig) -> None:
    done = process_group(group, config)
    found = verify_provenance(done.micro_steps, _records(group))
    assert found.targets == done.stats.trained_tokens
    assert found.micro_steps == len(done.micro_steps)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("ids", "the id is not"),
        ("behaviour", "the log-prob is not"),
        ("version", "the version is not"),
        ("temperature", "the temperature is not"),
        ("offset", "sampled tokens"),
        ("call", "no record"),
    ],
)
def test_a_target_that_differs_from_its_record_is_named(column: str, message: str) -> None:
    group = example_group()
    done = process_group(group, TrajectoryConfig(token_budget=40))
    broken = done.micro_steps[1]
    values = getattr(broken, column).copy()
    entry = int(np.flatnonzero(broken.target)[-1])
    values[entry] += 100
    forged = [done.micro_steps[0], dataclasses.replace(broken, **{column: values}), *done.micro_steps[2:]]
    with pytest.raises(ProvenanceError, match=rf"^micro-step 1, .*{message}"):
        verify_provenance(forged, _records(group))


def test_a_micro_step_that_counts_twice_is_found() -> None:
    group = example_group()
    done = process_group(group, TrajectoryConfig(token_budget=40))
    with pytest.raises(ProvenanceError, match=r"more than once"):
        verify_provenance([*done.micro_steps, done.micro_steps[0]], _records(group))


def test_a_target_moved_along_its_sequence_is_found() -> None:
    script = Script()
    script.call([1], [5, 5])
    other = Script("e1")
    other.call([1], [6])
    group = [GradedEpisode("e0", script.records, 1.0), GradedEpisode("e1", other.records, 0.0)]
    (micro_step,) = process_group(group, TrajectoryConfig()).micro_steps
    cut = dataclasses.replace(micro_step, ids=np.where(micro_step.ids == 6, 5, micro_step.ids))
    assert verify_provenance([micro_step], _records(group)).targets == 3
    with pytest.raises(ProvenanceError, match="the id is not"):
        verify_provenance([cut], _records(group))
    swapped = micro_step.offset.copy()
    swapped[[1, 2]] = swapped[[2, 1]]
    with pytest.raises(ProvenanceError, match="the position is not"):
        verify_provenance([dataclasses.replace(micro_step, offset=swapped)], _records(group))


@given(groups())
@settings(max_examples=30, deadline=None)
def test_records_of_another_group_explain_nothing(group: list[GradedEpisode]) -> None:
    done = process_group(group, TrajectoryConfig())
    assume(done.micro_steps)
    with pytest.raises(ProvenanceError, match="no records of this episode"):
        verify_provenance(done.micro_steps, {})
