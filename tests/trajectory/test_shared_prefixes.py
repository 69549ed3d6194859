"""Trajectories of an episode that meet in a micro-step hold their common prefix once, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from trajectory_reference import Script, groups

from trajectory.config import TrajectoryConfig
from trajectory.episode import GradedEpisode
from trajectory.micro_step import MicroStep
from trajectory.process import process_group
from trajectory.verify import verify_provenance

caps = st.sampled_from([2, 5, None])
budgets = st.sampled_from([1, 13, 40, 100_000])


def _rows(micro_step: MicroStep) -> list[tuple[Any, ...]]:
    """Every trajectory written out: tokens, targets and where they were sampled, factors."""
    whole = micro_step.unshared()
    rows = []
    for i, kind in enumerate(whole.kinds):
        run = slice(int(whole.cu_seqlens[i]), int(whole.cu_seqlens[i + 1]))
        names = ("ids", "target", "behaviour", "temperature", "version", "call", "offset")
        columns = [tuple(getattr(whole, name)[run].tolist()) for name in names]
        episode = whole.episodes[whole.episode_index[i]]
        rows.append((episode, kind, whole.advantage[i], whole.weight[i], *columns))
    return rows


@settings(max_examples=300, deadline=None)
@given(groups(), caps, budgets)
def test_shared_micro_steps_hold_the_same_trajectories_as_unshared_ones(
    group: list[GradedEpisode], cap: int | None, budget: int
) -> None:
    plain = process_group(group, TrajectoryConfig(cap=cap, token_budget=budget, share_prefixes=False))
    shared = process_group(group, TrajectoryConfig(cap=cap, token_budget=budget, share_prefixes=True))
    expected = sorted(row for m in plain.micro_steps for row in _rows(m))
    assert sorted(row for m in shared.micro_steps for row in _rows(m)) == expected
    assert all((m.prefix_of == -1).all() for m in plain.micro_steps)
    assert plain.recomputed_tokens == 0
    if budget >= 100_000:
        assert shared.recomputed_tokens == 0
    assert sum(m.tokens for m in shared.micro_steps) <= sum(m.tokens for m in plain.micro_steps)


@settings(max_examples=300, deadline=None)
@given(groups(), caps, budgets)
def test_a_micro_step_computes_each_prefix_of_an_episode_once_and_targets_lie_in_own_runs(
    group: list[GradedEpisode], cap: int | None, budget: int
) -> None:
    done = process_group(group, TrajectoryConfig(cap=cap, token_budget=budget, share_prefixes=True))
    assume(done.micro_steps)
    records = {e.episode: e.records for e in group}
    unique = set()
    for m in done.micro_steps:
        prefixes = set()
        for i in range(len(m.kinds)):
            path = m.path(i)
            tokens = m.ids[path].tolist()
            assert len(tokens) == m.lengths[i]
            own = path[m.prefix_len[i] :]
            assert own.tolist() == [*range(m.cu_seqlens[i], m.cu_seqlens[i + 1])]
            prefixes |= {(int(m.episode_index[i]), tuple(tokens[: k + 1])) for k in range(len(tokens))}
            episode = m.episodes[m.episode_index[i]]
            unique |= {(episode, tuple(tokens[: k + 1])) for k in range(len(tokens))}
        assert m.tokens == len(prefixes)
        assert m.targets == sum(int(m.target[a:b].sum()) for a, b in zip(m.cu_seqlens, m.cu_seqlens[1:], strict=False))
    assert verify_provenance(done.micro_steps, records).targets == done.stats.trained_tokens
    assert done.recomputed_tokens == sum(m.tokens for m in done.micro_steps) - len(unique)


def test_windows_share_the_system_prompt_and_a_summary_its_window() -> None:
    script = Script()
    system = [*range(100, 120)]
    script.call([*system, 1], [2, 3])
    script.call([4], [5], parent=0)
    script.call([6], [7, 7], parent=1, summary=True, fork="summary")
    script.call([8], [9], parent=0, kept=20, compacts=2, fork="compaction")
    other = Script("e1")
    other.call([1], [2])
    group = [GradedEpisode("e0", script.records, 1.0), GradedEpisode("e1", other.records, 0.0)]
    (m,) = process_group(group, TrajectoryConfig(share_prefixes=True)).micro_steps
    assert m.kinds == ("main", "main_summary", "main", "main")
    assert m.prefix_of.tolist() == [-1, 0, 0, -1]
    assert m.prefix_len.tolist() == [0, 25, 20, 0]
    assert np.diff(m.cu_seqlens).tolist() == [25, 3, 2, 2]
