"""The loss and its gradient, against formulas written out and under every cut into micro-steps."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from trajectory_reference import (
    Choices,
    Key,
    Script,
    advantages,
    groups,
    loss,
    normaliser,
    ownership,
    random_script,
    sampled_on,
    samplers,
    selection,
)

from trajectory.additive import add_all
from trajectory.advantage import ADVANTAGES
from trajectory.config import LossConfig, TrajectoryConfig
from trajectory.episode import GradedEpisode
from trajectory.loss import LOSSES, LossStats, policy_loss
from trajectory.micro_step import MicroStep
from trajectory.process import process_group
from trajectory.reduction import REDUCTIONS
from trajectory.selection import DRAWS

PROXIMAL = LossConfig()
BEHAVIOUR = LossConfig(old="behaviour", mismatch_p99=0.0)


def _keys(group: Sequence[GradedEpisode]) -> list[Key]:
    return [(e.episode, *by) for e in group for by in samplers(e.records)[0].values()]


def _free_log_probs(group: Sequence[GradedEpisode], rng: random.Random, spread: float) -> dict[Key, float]:
    """A policy as a table: one free log-prob per sampled token, ``spread`` nats around the behaviour's."""
    records = {e.episode: e.records for e in group}
    return {
        (e, call, offset): float(records[e][call].logprobs[offset]) + rng.uniform(-spread, spread)
        for e, call, offset in _keys(group)
    }


def _run(
    micro_steps: Sequence[MicroStep], table: dict[Key, float], config: LossConfig, dtype: torch.dtype = torch.float64
) -> tuple[float, dict[Key, float], LossStats]:
    """Loss, gradient by token and statistics: autograd on the table, summed over micro-steps."""
    index = {key: i for i, key in enumerate(table)}
    values = torch.tensor([*table.values(), math.nan], dtype=dtype, requires_grad=True)
    total, parts = 0.0, []
    for m in micro_steps:
        owner = np.repeat(m.episode_index, np.diff(m.cu_seqlens))
        where = [
            index[m.episodes[e], int(c), int(o)] if t else len(table)  # not a number wherever nothing is a target
            for e, c, o, t in zip(owner, m.call, m.offset, m.target, strict=True)
        ]
        value, part = policy_loss(values[torch.tensor(where)], m, config)
        value.backward()
        total += value.item()
        parts.append(vars(part))
    assert values.grad is not None
    gradient = values.grad.tolist()
    assert gradient.pop() == 0
    return total, dict(zip(table, gradient, strict=True)), LossStats(**add_all(parts))


choices = st.builds(
    Choices,
    cap=st.sampled_from([2, 5, None]),
    draw=st.sampled_from([*DRAWS]),
    reserve=st.sampled_from([0, 0, 1, 2]),
    advantage=st.sampled_from([*ADVANTAGES]),
    reduction=st.sampled_from([*REDUCTIONS]),
    loss=st.sampled_from([*LOSSES]),
    old=st.sampled_from(["proximal", "behaviour"]),
    low=st.sampled_from([3e-4, 0.2, 0.99]),
    high=st.sampled_from([4e-4, 0.2]),
    truncation=st.sampled_from([2.0, 1.2, math.inf]),
)


def _configs(chosen: Choices, *, budget: int, share: bool) -> tuple[TrajectoryConfig, LossConfig]:
    trajectory = TrajectoryConfig(
        advantage=chosen.advantage,
        reduction=chosen.reduction,
        cap=chosen.cap,
        draw=chosen.draw,
        summary_reserve=chosen.reserve if chosen.cap else 0,
        token_budget=budget,
        share_prefixes=share,
    )
    loss_config = LossConfig.model_validate(
        {
            "loss": chosen.loss,
            "old": chosen.old,
            "epsilon_low": chosen.low,
            "epsilon_high": chosen.high,
            "truncation": None if chosen.truncation == math.inf else chosen.truncation,
            "mismatch_p99": 0.0,
        }
    )
    return trajectory, loss_config


@settings(max_examples=600, deadline=None)
@given(
    groups(),
    choices,
    st.tuples(st.sampled_from([1, 13, 40, 100_000]), st.booleans()),
    st.sampled_from([1e-4, 1e-2, 3.0]),
    st.randoms(use_true_random=False),
)
def test_loss_gradient_and_normaliser_are_those_of_the_reference(
    group: list[GradedEpisode], chosen: Choices, cut: tuple[int, bool], spread: float, rng: random.Random
) -> None:
    budget, share = cut
    chosen = dataclasses.replace(chosen, reserve=chosen.reserve if chosen.cap else 0)
    trajectory, loss_config = _configs(chosen, budget=budget, share=share)
    done = process_group(rng.sample(group, len(group)), trajectory)
    assert done.normaliser == normaliser(group, chosen)
    assume(done.micro_steps)
    table = _free_log_probs(group, rng, spread)
    micro_steps = rng.sample(done.micro_steps, len(done.micro_steps))
    value, gradient, stats = _run(micro_steps, table, loss_config)
    expected, expected_gradient = loss(group, table, chosen)
    assert value == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert gradient == pytest.approx(expected_gradient, rel=1e-10, abs=1e-10)
    assert stats.targets == sum(m.targets for m in micro_steps)


@settings(max_examples=60, deadline=None)
@given(groups(), choices, st.randoms(use_true_random=False))
def test_the_gradient_is_the_slope_of_the_loss_where_gradients_do_not_stop(
    group: list[GradedEpisode], chosen: Choices, rng: random.Random
) -> None:
    """Central differences, one direction in the space of all tokens at a time, away from the corners of clipping."""
    chosen = dataclasses.replace(chosen, reserve=0, low=0.2, high=0.2)
    trajectory, loss_config = _configs(chosen, budget=40, share=True)
    micro_steps = process_group(group, trajectory).micro_steps
    assume(micro_steps)
    table = _free_log_probs(group, rng, 0.15)
    _, gradient, _ = _run(micro_steps, table, loss_config)
    for _ in range(3):
        direction = {key: rng.uniform(-1, 1) for key in table}
        plus, minus = ({k: v + sign * 1e-6 * direction[k] for k, v in table.items()} for sign in (1, -1))
        slope = (loss(group, plus, chosen, table)[0] - loss(group, minus, chosen, table)[0]) / 2e-6
        assert sum(gradient[k] * direction[k] for k in table) == pytest.approx(slope, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("old", ["proximal", "behaviour"])
@pytest.mark.parametrize("name", [*LOSSES])
def test_every_choice_of_loss_survives_any_cut_with_mixed_versions_duplicates_and_excluded_episodes(
    name: str, old: str
) -> None:
    rng = random.Random(5)
    group = [
        GradedEpisode(f"e{i}", random_script(random.Random(39 + i), f"e{i}", 12).records, reward)
        for i, reward in enumerate([1.0, 0.0, None, 0.5])
    ]
    assert sum(samplers(e.records)[1] for e in group) > 0
    assert len({int(v) for e in group for r in e.records for v in r.versions}) > 1
    table = _free_log_probs(group, rng, 0.3)
    found = []
    for reduction in REDUCTIONS:
        chosen = Choices(loss=name, old=old, reduction=reduction, cap=None, low=0.1, high=0.1)
        for budget, share in ((100_000, False), (1, False), (100_000, True), (25, True), (60, True)):
            trajectory, loss_config = _configs(chosen, budget=budget, share=share)
            cut = process_group(rng.sample(group, len(group)), trajectory).micro_steps
            value, gradient, _ = _run(rng.sample(cut, len(cut)), table, loss_config)
            found.append((value, gradient))
            assert value == pytest.approx(found[0][0], rel=1e-10, abs=1e-10)
            assert gradient == pytest.approx(found[0][1], rel=1e-10, abs=1e-10)
        found.clear()


@settings(max_examples=100, deadline=None)
@given(groups(), st.sampled_from([PROXIMAL, BEHAVIOUR]), st.randoms(use_true_random=False))
def test_the_cut_into_micro_steps_and_the_order_of_episodes_change_nothing(
    group: list[GradedEpisode], config: LossConfig, rng: random.Random
) -> None:
    whole = process_group(group, TrajectoryConfig(token_budget=100_000)).micro_steps
    assume(whole)
    table = _free_log_probs(group, rng, 0.3)
    value, gradient, stats = _run(whole, table, config)
    for budget in (1, 13, 50):
        cut = process_group(rng.sample(group, len(group)), TrajectoryConfig(token_budget=budget)).micro_steps
        rng.shuffle(cut)
        other, other_gradient, other_stats = _run(cut, table, config)
        assert other == pytest.approx(value, rel=1e-10, abs=1e-10)
        assert other_gradient == pytest.approx(gradient, rel=1e-10, abs=1e-10)
        sums = dict.fromkeys(("sum_delta", "sum_abs_delta", "sum_abs_sequence_log_ratio"), 0.0)
        assert dataclasses.replace(other_stats, **sums) == dataclasses.replace(stats, **sums)
        for name in sums:
            assert getattr(other_stats, name) == pytest.approx(getattr(stats, name), rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(groups())
def test_on_policy_the_gradient_does_not_depend_on_who_owns_a_token(group: list[GradedEpisode]) -> None:
    micro_steps = process_group(group, TrajectoryConfig()).micro_steps
    assume(micro_steps)
    table = _free_log_probs(group, random.Random(0), 0.0)
    _, gradient, _ = _run(micro_steps, table, PROXIMAL)
    advantage = {
        m.episodes[i]: float(a) for m in micro_steps for i, a in zip(m.episode_index, m.advantage, strict=True)
    }
    for e in group:
        if e.reward is None:
            continue
        first, _ = samplers(e.records)
        covered = {p for seq in selection(e.episode, e.records, 5) for p in sampled_on(e.records, seq)}
        for prefix, by in first.items():
            expected = -advantage[e.episode] / len(covered) if prefix in covered else 0.0
            assert gradient[(e.episode, *by)] == pytest.approx(expected, rel=1e-10, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(groups(), st.randoms(use_true_random=False))
def test_on_policy_any_order_of_ownership_gives_this_gradient(group: list[GradedEpisode], rng: random.Random) -> None:
    """The reference's formula for trajectories that own in a random order, against the processor's chronological."""
    micro_steps = process_group(group, TrajectoryConfig(token_budget=30)).micro_steps
    assume(micro_steps)
    table = _free_log_probs(group, random.Random(0), 0.0)
    _, gradient, _ = _run(micro_steps, table, PROXIMAL)
    expected = dict.fromkeys(table, 0.0)
    for e, advantage in zip(group, advantages([e.reward for e in group]), strict=True):
        if advantage is None:
            continue
        first, _ = samplers(e.records)
        chosen = selection(e.episode, e.records, 5)
        owned = ownership(e.records, rng.sample(chosen, len(chosen)))
        everything = sum(map(len, owned.values()))
        for tokens in owned.values():
            for prefix in tokens:  # (|T| / E) · (1 / |T|) · Â, with s = w = 1
                expected[(e.episode, *first[prefix])] -= len(tokens) / everything * advantage / len(tokens)
    assert gradient == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_from_records_to_the_published_formula_in_behaviour_mode() -> None:
    """One call per episode, so one trajectory: (1/G) Σ min(s_i Â_i, clip(s_i, 1 − ε_low, 1 + ε_high) Â_i), no ratio
    near a bound."""
    behaviour = [[-0.5, -1.25], [-0.75, -0.25, -2.0], [-1.0, -0.5], [-0.125]]
    shift = [1e-4, -2e-4, 0.05, -0.05]
    rewards = [1.0, 0.0, 1.0, 0.0]
    group, table = [], {}
    for i, row in enumerate(behaviour):
        script = Script(f"e{i}")
        script.call([1, 2], [10 + k for k in range(len(row))], logprobs=row)
        group.append(GradedEpisode(script.episode, script.records, rewards[i]))
        table |= {(script.episode, 0, k): value + shift[i] for k, value in enumerate(row)}
    done = process_group(group, TrajectoryConfig())
    value, gradient, stats = _run(done.micro_steps, table, BEHAVIOUR)
    normalised = 0.5 / (0.5 + 1e-6)
    # s = exp(1e-4) and exp(-2e-4) inside, exp(0.05) and exp(-0.05) clipped to 1.0004 and 0.9997
    terms = [1.0001000050001667, -0.9998000199986667, 1.0004, -0.9997]
    assert value / done.normaliser == pytest.approx(-normalised * sum(terms) / 4, abs=1e-9)
    assert (stats.clipped_positive, stats.clipped_negative) == (1, 1)
    slopes = {"e0": -normalised * terms[0] / 2, "e1": -normalised * terms[1] / 3, "e2": 0.0, "e3": 0.0}
    assert gradient == pytest.approx({key: slopes[key[0]] for key in table}, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(groups(), st.randoms(use_true_random=False))
def test_single_precision_is_close_to_double(group: list[GradedEpisode], rng: random.Random) -> None:
    micro_steps = process_group(group, TrajectoryConfig()).micro_steps
    assume(micro_steps)
    table = _free_log_probs(group, rng, 0.3)
    value, gradient, _ = _run(micro_steps, table, PROXIMAL)
    single, single_gradient, _ = _run(micro_steps, table, PROXIMAL, torch.float32)
    assert single == pytest.approx(value, rel=1e-5, abs=1e-5)
    assert single_gradient == pytest.approx(gradient, rel=1e-5, abs=1e-6)


def _micro_step(behaviour: list[list[float]], advantage: list[float], weight: list[float]) -> MicroStep:
    """One prompt token, then targets; one episode per trajectory."""
    lengths = [len(row) + 1 for row in behaviour]
    target = np.concatenate([[False] + [True] * len(row) for row in behaviour])
    offset = np.concatenate([np.arange(-1, len(row)) for row in behaviour]).astype(np.int32)
    return MicroStep(
        ids=np.arange(len(target), dtype=np.int32),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        prefix_of=np.full(len(lengths), -1, np.int32),
        prefix_len=np.zeros(len(lengths), np.int32),
        target=target,
        behaviour=np.concatenate([[0.0, *row] for row in behaviour]).astype(np.float32),
        temperature=np.ones(len(target), np.float32),
        version=np.where(target, 3, -1).astype(np.int32),
        call=np.where(target, 0, -1).astype(np.int32),
        offset=offset,
        advantage=np.asarray(advantage),
        weight=np.asarray(weight),
        episode_index=np.arange(len(behaviour), dtype=np.int32),
        episodes=tuple(f"e{i}" for i in range(len(behaviour))),
        kinds=("main",) * len(behaviour),
    )


def test_behaviour_mode_is_the_published_gspo_formula() -> None:
    """GSPO, arXiv:2507.18071, eq. 5 to 7: (1/G) Σ min(s_i Â_i, clip(s_i, 1 − ε, 1 + ε) Â_i), length-normalised s_i."""
    behaviour = [[-0.5, -1.25], [-0.75, -0.25, -2.0], [-1.0, -0.5], [-0.125]]
    current = [[-0.4997, -1.2502], [-0.7501, -0.2503, -1.9997], [-0.9, -0.4], [-0.225]]
    advantage = [1.5, -0.5, 1.0, -2.0]
    micro_step = _micro_step(behaviour, advantage, [0.25] * 4)
    logp = torch.tensor([v for row in current for v in [0.0, *row]], dtype=torch.float64, requires_grad=True)
    value, stats = policy_loss(logp, micro_step, BEHAVIOUR)

    # ratios: exp(1e-4 / 2), exp(-1e-4 / 3), exp(0.1) and exp(-0.1); the last two are clipped
    expected = -0.25 * (1.5 * 1.0000500012500208 - 0.5 * 0.9999666672222160 + 1.0 * 1.0004 - 2.0 * 0.9997)
    assert value.item() == pytest.approx(expected, abs=1e-9)
    value.backward()
    assert logp.grad is not None
    first, second = -0.25 * 1.5 * 1.0000500012500208 / 2, 0.25 * 0.5 * 0.9999666672222160 / 3
    assert logp.grad.tolist() == pytest.approx([0, first, first, 0, second, second, second, 0, 0, 0, 0, 0], abs=1e-9)
    assert (stats.positive, stats.clipped_positive, stats.negative, stats.clipped_negative) == (2, 1, 2, 1)
    assert stats.max_sequence_log_ratio == pytest.approx(0.1, abs=1e-6)


def test_the_proximal_ratio_is_one_and_the_correction_is_truncated_and_detached() -> None:
    behaviour = [[-1.0, -3.0], [-1.0]]
    micro_step = _micro_step(behaviour, [1.0, -1.0], [0.5, 1.0])
    logp = torch.tensor([0.0, -0.5, -1.0, 0.0, -1.5], dtype=torch.float64, requires_grad=True)
    value, stats = policy_loss(logp, micro_step, PROXIMAL)
    w = math.exp(-0.5)  # the first trajectory's exp(1.25) is cut at 2
    assert value.item() == pytest.approx(-0.5 * 2.0 + w, abs=1e-12)
    value.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0, -0.5, -0.5, 0, w], abs=1e-12)
    assert (stats.truncated, stats.clipped_positive, stats.clipped_negative) == (1, 0, 0)
    assert (stats.max_token_delta, stats.max_sequence_log_ratio, stats.sum_abs_delta) == (2.0, 1.25, 3.0)


def test_the_behaviour_ratio_is_refused_without_a_measured_match_of_engine_and_trainer() -> None:
    for measured in (None, 3e-5, 1e-2):
        with pytest.raises(ValidationError, match="use old = proximal"):
            LossConfig(old="behaviour", mismatch_p99=measured)
    assert LossConfig(old="behaviour", mismatch_p99=2e-5).old == "behaviour"


def test_clips_that_a_configuration_does_not_name_are_those_of_its_loss() -> None:
    assert (LossConfig().epsilon_low, LossConfig().epsilon_high) == (3e-4, 4e-4)
    token = LossConfig.model_validate({"loss": "grpo", "epsilon_low": None, "epsilon_high": 0.28})
    assert (token.epsilon_low, token.epsilon_high) == (0.2, 0.28)
    assert LossConfig.model_validate_json(token.model_dump_json()) == token
    with pytest.raises(ValidationError):
        LossConfig.model_validate({"loss": "ppo"})


def test_without_a_bound_nothing_is_truncated_and_a_clipped_weight_keeps_its_gradient() -> None:
    behaviour, rows = [[-1.0, -3.0], [-1.0]], [0.0, -0.5, -1.0, 0.0, -1.5]
    micro_step = _micro_step(behaviour, [1.0, -1.0], [0.5, 1.0])
    logp = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    free = policy_loss(logp, micro_step, LossConfig(truncation=None))
    assert free[0].item() == pytest.approx(-0.5 * math.exp(1.25) + math.exp(-0.5), abs=1e-12)
    assert free[1].truncated == 0
    clipped = LossConfig.model_validate({"loss": "cispo", "old": "behaviour", "mismatch_p99": 0.0, "epsilon_high": 0.5})
    value, stats = policy_loss(logp, micro_step, clipped)
    value.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0, -0.25 * 1.5, -0.25 * 1.5, 0, math.exp(-0.5)], abs=1e-12)
    assert (stats.positive, stats.clipped_positive, stats.negative, stats.clipped_negative) == (2, 2, 1, 0)


def test_log_probs_of_another_shape_or_precision_are_refused() -> None:
    micro_step = _micro_step([[-1.0]], [1.0], [1.0])
    with pytest.raises(ValueError, match="not float32 or float64 \\[2\\]"):
        policy_loss(torch.zeros(3), micro_step, PROXIMAL)
    with pytest.raises(ValueError, match="bfloat16"):
        policy_loss(torch.zeros(2, dtype=torch.bfloat16), micro_step, PROXIMAL)
