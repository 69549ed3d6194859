"""A step's gauges: values worked out by hand, and sums that don't depend on how a step was cut."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_reference import Script, groups

from trajectory.additive import BINS_PER_DECADE, EDGES, add, add_all, quantile
from trajectory.config import LossConfig, TrajectoryConfig
from trajectory.episode import GradedEpisode
from trajectory.gauges import MEANING, Gauges, combine, group_gauges, loss_gauges, summary
from trajectory.loss import LossStats, policy_loss
from trajectory.micro_step import MicroStep
from trajectory.process import process_group

# --- what adds up

statistics = st.fixed_dictionaries(
    {"count": st.integers(0, 99), "max_delta": st.integers(0, 99)},
    optional={"bins": st.dictionaries(st.sampled_from("0123"), st.integers(1, 9))},
)


@given(statistics, statistics, statistics)
def test_sums_are_associative_commutative_and_have_a_zero(a: Any, b: Any, c: Any) -> None:
    assert add(add(a, b), c) == add(a, add(b, c)) == add_all([c, a, b])
    assert add(a, {}) == add({}, a) == a
    assert add(a, b)["max_delta"] == max(a["max_delta"], b["max_delta"])


def _histogram(values: Sequence[float]) -> dict[str, int]:
    places = np.searchsorted(EDGES, values)
    return {str(place): int(count) for place, count in zip(*np.unique(places, return_counts=True), strict=True)}


@settings(deadline=None)
@given(st.lists(st.floats(1e-9, 10), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_never_below_the_exact_one_and_at_most_a_bin_above(values: list[float], q: float) -> None:
    exact = sorted(values)[math.ceil(q * len(values)) - 1]
    bound = quantile(_histogram(values), q)
    assert bound is not None
    assert exact <= bound <= exact * 10 ** (1 / BINS_PER_DECADE) * (1 + 1e-9)


def test_a_quantile_of_nothing_is_none_and_beyond_all_bins_infinite() -> None:
    assert quantile({}, 0.99) is None
    assert quantile(_histogram([0.0, 0.0]), 0.99) == 1e-9
    assert quantile(_histogram([11.0]), 0.5) == math.inf


# --- how far serving and training disagree


def _group() -> list[GradedEpisode]:
    """Four episodes of one trajectory each: the best and the worst have tool calls that are none, one is excluded."""
    first, second, third, fourth = (Script(f"e{i}") for i in range(4))
    first.call([1], [5, 6], version=3)
    first.call([2], [7, 8, 9, 9], parent=0, version=4)
    second.call([1], [5], version=4)
    second.call([2], [6], parent=0, version=4)
    third.call([1], [6, 6, 6], version=4)
    third.call([1], [6, 6, 6], version=4, fork="sample")  # the same three once more
    fourth.call([1], [4] * 70, version=4)
    first.records[1] = _with(first.records[1], malformed=2)
    second.records[0] = _with(second.records[0], malformed=1)
    return [
        GradedEpisode("e0", first.records, 1.0),
        GradedEpisode("e1", second.records, 0.0),
        GradedEpisode("e2", third.records, 0.5),
        GradedEpisode("e3", fourth.records, None),
    ]


def _with(record: Any, **fields: Any) -> Any:
    return type(record)(**{name: getattr(record, name) for name in record.__struct_fields__} | fields)


def _loss(micro_step: MicroStep, shift: dict[str, float], config: LossConfig | None = None) -> LossStats:
    """Statistics of a policy whose log-probs are the behaviour's, moved by so much in each episode."""
    owner = np.repeat(micro_step.episode_index, np.diff(micro_step.cu_seqlens))
    moved = np.asarray([shift[name] for name in micro_step.episodes])[owner]
    logp = torch.from_numpy(micro_step.behaviour.astype(np.float64) + moved)
    return policy_loss(logp, micro_step, config or LossConfig())[1]


SHIFT = {"e0": 2e-3, "e1": -1e-2, "e2": 1e-5}


def test_the_mismatch_of_three_trajectories_by_hand() -> None:
    (micro_step,) = process_group(_group(), TrajectoryConfig()).micro_steps
    stats = _loss(micro_step, SHIFT)
    assert (stats.trajectories, stats.units, stats.targets) == (3, 3, 6 + 2 + 3)
    assert stats.sum_delta == pytest.approx(6 * 2e-3 - 2 * 1e-2 + 3 * 1e-5)
    assert stats.sum_abs_delta == pytest.approx(6 * 2e-3 + 2 * 1e-2 + 3 * 1e-5)
    assert stats.sum_abs_sequence_log_ratio == pytest.approx(2e-3 + 1e-2 + 1e-5)
    assert (stats.clipped_positive, stats.clipped_negative) == (0, 0), "with π_old = sg(π_θ) nothing is clipped"
    assert (stats.positive, stats.outside_positive, stats.negative, stats.outside_negative) == (1, 1, 1, 1)
    assert sum(stats.token_delta.values()) == 11
    assert {version: sum(bins.values()) for version, bins in stats.sequence_log_ratio.items()} == {"3": 1, "4": 2}

    told = summary(loss_gauges(dataclasses.asdict(stats), version=4))
    assert told["token_log_ratio"] == pytest.approx((0.012 - 0.02 + 3e-5) / 11, rel=1e-3)
    assert told["token_max"] == told["sequence_max"] == told["sequence_p99"] == pytest.approx(1e-2, rel=1e-3)
    assert 2e-3 <= told["sequence_p50"] <= 2e-3 * 1.16
    assert told["mismatch_p99"] == pytest.approx(1e-2, rel=1e-3), "of e1 and e2, which version 4 alone has sampled"
    assert told["outside_positive"] == told["outside_negative"] == 1.0
    only_stale = loss_gauges(dataclasses.asdict(stats), version=5)
    assert "mismatch_p99" not in summary(only_stale)
    assert set(only_stale.loss["sequence_log_ratio"]) == {"2", "1"}


def test_the_plain_ratio_is_clipped_where_it_is_outside() -> None:
    (micro_step,) = process_group(_group(), TrajectoryConfig()).micro_steps
    plain = LossConfig(old="behaviour", mismatch_p99=0.0)
    for shift in (SHIFT, {"e0": -1e-2, "e1": 1e-2, "e2": 0.0}, dict.fromkeys(SHIFT, 0.0)):
        stats = _loss(micro_step, shift, plain)
        assert stats.clipped_positive == stats.outside_positive
        assert stats.clipped_negative == stats.outside_negative


@pytest.mark.parametrize("loss", ["gspo", "gspo_token", "grpo", "cispo"])
def test_statistics_of_any_cut_and_through_json_add_up_to_the_whole(loss: str) -> None:
    config = LossConfig.model_validate({"loss": loss})
    (whole,) = process_group(_group(), TrajectoryConfig()).micro_steps
    one = loss_gauges(dataclasses.asdict(_loss(whole, SHIFT, config)), version=4)
    parts = process_group(_group(), TrajectoryConfig(token_budget=1)).micro_steps
    assert len(parts) == 3
    cut = [json.loads(json.dumps(dataclasses.asdict(_loss(part, SHIFT, config)))) for part in parts]
    random.Random(1).shuffle(cut)
    assert summary(combine(loss_gauges(part, version=4) for part in cut)) == summary(one)


# --- what became of what was sampled


def test_the_gauges_of_a_group_by_hand() -> None:
    done = process_group(_group(), TrajectoryConfig())
    gauges = group_gauges(done.stats, task="t#1", excluded={"evaluator_failed": 1}, version=5)
    assert (gauges.groups, gauges.episodes, gauges.excluded) == (1, 4, {"evaluator_failed": 1})
    assert gauges.lengths == {"1": {"episodes": 3, "excluded": 0}, "64": {"episodes": 1, "excluded": 1}}
    assert gauges.rewards == {"t#1": {"episodes": 3.0, "reward": pytest.approx(1.5)}}
    assert gauges.malformed == {
        "negative": {"calls": 2, "malformed_calls": 1, "malformed_spans": 1},
        "positive": {"calls": 2, "malformed_calls": 1, "malformed_spans": 2},
        "zero": {"calls": 2, "malformed_calls": 0, "malformed_spans": 0},
    }
    assert (gauges.sampled, gauges.trained, gauges.left_out) == ({"main": 11}, {"main": 11}, {})
    assert gauges.duplicates == 3
    assert gauges.trained_by_lag == {"2": 2, "1": 9}
    told = summary(gauges)
    assert told == {
        "trained": 1.0,
        "left_out": 0.0,
        "no_gradient": 0.0,
        "duplicates": pytest.approx(3 / 14, rel=1e-3),
        "excluded": 0.25,
        "stale": 1.0,
        "lag": pytest.approx((2 * 2 + 9) / 11, rel=1e-3),
        "malformed_positive": 0.5,
        "malformed_negative": 0.5,
    }
    assert set(told) <= set(MEANING)


def test_a_group_without_gradient_says_why_and_trains_nothing() -> None:
    _, second, third, excluded = _group()
    alike = [dataclasses.replace(second, reward=1.0), dataclasses.replace(third, reward=1.0), excluded]
    gauges = group_gauges(process_group(alike, TrajectoryConfig()).stats, task="t", excluded={}, version=4)
    assert gauges.groups_without_gradient == {"no_variance": 1}
    assert (gauges.trained, gauges.without_gradient) == ({}, {"main": 5})
    assert set(gauges.malformed) == {"zero"}
    assert summary(gauges)["no_gradient"] == 1.0
    assert "stale" not in summary(gauges), "a share of nothing is left out"


def test_an_evaluation_says_nothing_of_training() -> None:
    gauges = group_gauges(
        process_group(_group(), TrajectoryConfig()).stats, task="t", excluded={}, version=4, train=False
    )
    assert gauges.sampled == {"main": 11}
    assert not gauges.trained and not gauges.left_out and not gauges.without_gradient and not gauges.trained_by_lag
    assert set(summary(gauges)) == {"duplicates", "excluded", "malformed_positive", "malformed_negative"}


@settings(max_examples=100, deadline=None)
@given(groups(), st.sampled_from([1, 2, 5, None]), st.booleans())
def test_every_sampled_token_is_trained_left_out_or_without_gradient(
    group: list[GradedEpisode], cap: int | None, share: bool
) -> None:
    done = process_group(group, TrajectoryConfig(cap=cap, share_prefixes=share, token_budget=40))
    gauges = group_gauges(done.stats, task="t", excluded={}, version=6)
    assert add_all([gauges.trained, gauges.left_out, gauges.without_gradient]) == gauges.sampled
    assert (
        sum(gauges.trained.values()) == sum(gauges.trained_by_lag.values()) == sum(m.targets for m in done.micro_steps)
    )
    assert bool(gauges.groups_without_gradient) == (not done.micro_steps)
    assert sum(counts["episodes"] for counts in gauges.lengths.values()) == len(group)
    sampled = sum(len(record.output_ids) for e in group if e.reward is not None for record in e.records)
    assert sum(gauges.sampled.values()) + gauges.duplicates == sampled


@settings(max_examples=50, deadline=None)
@given(st.lists(groups(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_gauges_of_groups_add_up_in_any_order_and_grouping(step: list[list[GradedEpisode]], rng: random.Random) -> None:
    parts = [
        group_gauges(process_group(g, TrajectoryConfig()).stats, task=f"t{i % 2}", excluded={"cancelled": i}, version=5)
        for i, g in enumerate(step)
    ]
    whole = combine(parts)
    cut = rng.randint(0, len(parts))
    mixed = rng.sample(parts, len(parts))
    halves = combine([combine(mixed[:cut]), combine(mixed[cut:])])
    assert summary(halves) == summary(whole)
    assert halves.model_dump(exclude={"rewards"}) == whole.model_dump(exclude={"rewards"})
    assert Gauges.model_validate_json(whole.model_dump_json()) == whole
    for task, one in whole.rewards.items():
        assert halves.rewards[task] == pytest.approx(one)
