"""Packs hold every trajectory once, count what is shared once, and split it only where it doesn't fit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajectory.packing import EpisodeShape, Packing, PackMembers, pack

Words = list[tuple[int, ...]]
"""The trajectories of one episode as sequences of tokens."""

words = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple), max_size=7)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _shape(name: str, trajectories: Words) -> EpisodeShape:
    order = sorted(range(len(trajectories)), key=lambda i: trajectories[i])
    common = [_common(trajectories[i], trajectories[j]) for i, j in pairwise(order)]
    return EpisodeShape(name, [len(t) for t in trajectories], order, common)


def _cost(episodes: list[Words], members: PackMembers) -> int:
    """Tokens of a pack: each prefix once."""
    return len({(e, episodes[e][t][: i + 1]) for e, t in members for i in range(len(episodes[e][t]))})


def _everything(episodes: list[Words]) -> PackMembers:
    return [(e, t) for e, trajectories in enumerate(episodes) for t in range(len(trajectories))]


@settings(max_examples=500, deadline=None)
@given(st.lists(words, max_size=5), st.integers(1, 60))
def test_every_trajectory_is_in_one_pack_within_the_budget_and_the_recomputed_tokens_are_counted(
    episodes: list[Words], budget: int
) -> None:
    packing = pack([_shape(f"e{i}", w) for i, w in enumerate(episodes)], budget)
    assert sorted(member for members in packing.packs for member in members) == _everything(episodes)
    costs = [_cost(episodes, members) for members in packing.packs]
    for members, cost in zip(packing.packs, costs, strict=True):
        assert cost <= budget or len(members) == 1
    assert packing.recomputed == sum(costs) - _cost(episodes, _everything(episodes))
    for e, trajectories in enumerate(episodes):
        if _cost(episodes, [(e, t) for t in range(len(trajectories))]) <= budget:
            assert sum(any(of == e for of, _ in members) for members in packing.packs) <= 1


@settings(max_examples=200, deadline=None)
@given(words, st.integers(1, 20))
def test_a_subtree_is_split_only_where_it_does_not_fit(trajectories: Words, budget: int) -> None:
    packing = pack([_shape("e", trajectories)], budget)
    where = {t: number for number, members in enumerate(packing.packs) for _, t in members}
    prefixes = {t[: i + 1] for t in trajectories for i in range(len(t))}
    for prefix in prefixes:
        below = [i for i, t in enumerate(trajectories) if t[: len(prefix)] == prefix]
        if _cost([trajectories], [(0, t) for t in below]) <= budget:
            assert len({where[t] for t in below}) == 1


@settings(max_examples=200, deadline=None)
@given(st.lists(words, max_size=5), st.integers(1, 60), st.randoms(use_true_random=False))
def test_the_order_in_which_episodes_are_given_changes_nothing(
    episodes: list[Words], budget: int, rng: random.Random
) -> None:
    def named(packing: Packing, names: list[str]) -> list[list[tuple[str, int]]]:
        return [[(names[e], t) for e, t in members] for members in packing.packs]

    shapes = [_shape(f"e{i}", w) for i, w in enumerate(episodes)]
    shuffled = rng.sample(shapes, len(shapes))
    one, other = pack(shapes, budget), pack(shuffled, budget)
    assert named(one, [s.name for s in shapes]) == named(other, [s.name for s in shuffled])
    assert one.recomputed == other.recomputed


@settings(max_examples=300, deadline=None)
@given(words, st.randoms(use_true_random=False))
def test_a_prefix_is_taken_from_the_one_before_that_shares_most(trajectories: Words, rng: random.Random) -> None:
    shape = _shape("e", trajectories)
    chosen = sorted(rng.sample(range(len(trajectories)), rng.randint(0, len(trajectories))))
    found = shape.prefixes(chosen)
    for position, (trajectory, (of, shared)) in enumerate(zip(chosen, found, strict=True)):
        earlier = [_common(trajectories[t], trajectories[trajectory]) for t in chosen[:position]]
        assert shared == max(earlier, default=0)
        assert (of == -1) == (shared == 0)
        if of >= 0:
            assert earlier[of] == shared
            assert found[of][1] < shared  # the last shared token is its own


def test_packs_are_as_few_as_the_budget_allows_and_of_similar_size() -> None:
    equal = [EpisodeShape.unshared(f"e{i}", [10]) for i in range(10)]
    assert sorted(len(members) for members in pack(equal, 45).packs) == [3, 3, 4]
    mixed = [EpisodeShape.unshared(f"e{i}", [n]) for i, n in enumerate([60, 50, 40, 30, 20, 10, 10, 300])]
    sizes = sorted(sum(mixed[e].lengths[t] for e, t in members) for members in pack(mixed, 119).packs)
    assert sizes == [110, 110, 300]


def test_a_trajectory_above_the_budget_is_alone_and_the_others_still_share() -> None:
    trunk = (0,) * 8
    trajectories: Words = [(*trunk, *[1] * 30), (*trunk, 2, 2), (*trunk, 3, 3)]
    packing = pack([_shape("e", trajectories)], 12)
    assert packing.packs == [[(0, 0)], [(0, 1), (0, 2)]]
    assert packing.recomputed == 8


def test_many_branches_under_a_small_budget_are_packed_quickly() -> None:
    comb: Words = [tuple([0] * i + [1]) for i in range(600)]
    packing = pack([_shape("e", comb)], 700)
    assert sum(len(members) for members in packing.packs) == 600


def test_a_budget_of_nothing_and_a_name_given_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        pack([EpisodeShape.unshared("e", [1])], 0)
    with pytest.raises(ValueError, match="same name"):
        pack([EpisodeShape.unshared("e", [1]), EpisodeShape.unshared("e", [1])], 5)
