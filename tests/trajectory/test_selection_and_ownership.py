"""At most ``cap`` trajectories by precedence, and each sampled token trained exactly once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_reference import (
    PRECEDENCE,
    Script,
    kinds,
    ownership,
    sampled_on,
    samplers,
    scripts,
    selection,
    sequences,
)

from trajectory.kinds import Kind, classify
from trajectory.selection import DRAWS, Selection, select
from trajectory.tree import EpisodeTree

caps = st.sampled_from([1, 2, 3, 5, None])


def _select(script: Script, cap: int | None, draw: str = "seeded", reserve: int = 0) -> tuple[EpisodeTree, Selection]:
    tree = EpisodeTree.from_records(script.records)
    return tree, select(tree, classify(script.records), cap, draw=draw, summary_reserve=reserve)


@settings(max_examples=400, deadline=None)
@given(scripts(14), caps, st.sampled_from([*DRAWS]), st.sampled_from([0, 0, 1, 2]))
def test_each_sampled_token_is_owned_by_the_first_selected_trajectory_that_contains_it(
    script: Script, cap: int | None, draw: str, reserve: int
) -> None:
    reserve = min(reserve, cap) if cap else 0
    tree, chosen = _select(script, cap, draw, reserve)
    first, _ = samplers(script.records)
    expected = ownership(script.records, selection(script.episode, script.records, cap, draw, reserve))
    assert [t.leaf.seq for t in chosen.trajectories] == list(expected)
    for trajectory in chosen.trajectories:
        owned = trajectory.path[trajectory.target]
        found = list(zip(tree.call[owned].tolist(), tree.offset[owned].tolist(), strict=True))
        assert found == [first[p] for p in expected[trajectory.leaf.seq]]
        assert trajectory.targets == len(found) > 0
        assert trajectory.target[-1]
        tokens = tree.ids[trajectory.path].tolist()
        assert tokens == sequences(script.records)[trajectory.leaf.seq][: len(tokens)]


@settings(max_examples=400, deadline=None)
@given(scripts(14), caps)
def test_no_candidate_of_higher_precedence_with_new_tokens_is_left_out(script: Script, cap: int | None) -> None:
    _, chosen = _select(script, cap)
    leaf_kinds = kinds(script.records)
    selected = [t.leaf.seq for t in chosen.trajectories]
    covered = {p for seq in selected for p in sampled_on(script.records, seq)}
    assert cap is None or len(selected) <= cap
    lowest = max((PRECEDENCE.index(leaf_kinds[seq]) for seq in selected), default=-1)
    for seq, kind in leaf_kinds.items():
        if kind in PRECEDENCE and seq not in selected and set(sampled_on(script.records, seq)) - covered:
            assert cap is not None and len(selected) == cap
            assert PRECEDENCE.index(kind) >= lowest


@settings(max_examples=300, deadline=None)
@given(scripts(14), caps)
def test_every_sampled_token_is_trained_or_counted_as_left_out_under_its_kind(script: Script, cap: int | None) -> None:
    _, chosen = _select(script, cap)
    first, _ = samplers(script.records)
    order = [*PRECEDENCE, "dead", "side"]
    kind_of: dict[tuple[int, ...], str] = {}
    for seq, kind in sorted(kinds(script.records).items(), key=lambda item: order.index(item[1])):
        for prefix in sampled_on(script.records, seq):
            kind_of.setdefault(prefix, kind)
    trained = {p for t in chosen.trajectories for p in sampled_on(script.records, t.leaf.seq)}
    for kind in order:
        of_kind = {p for p in first if kind_of[p] == kind}
        assert chosen.sampled.get(Kind(kind), 0) == len(of_kind)
        assert chosen.left_out.get(Kind(kind), 0) == len(of_kind - trained)
    assert sum(t.targets for t in chosen.trajectories) + sum(chosen.left_out.values()) == len(first)


@settings(max_examples=100, deadline=None)
@given(scripts(14))
def test_no_cap_is_a_cap_that_is_never_reached(script: Script) -> None:
    _, free = _select(script, None)
    _, wide = _select(script, 10_000)
    assert [t.leaf.seq for t in free.trajectories] == [t.leaf.seq for t in wide.trajectories]


def _many_windows(episode: str) -> Script:
    script = Script(episode)
    for i in range(20):
        script.call([100 + i], [1, 2])
    return script


def test_the_draw_within_a_kind_depends_on_the_episode_and_not_on_the_process() -> None:
    drawn = {e: [t.leaf.seq for t in _select(_many_windows(e), 5)[1].trajectories] for e in ("e1", "e2", "e3")}
    assert drawn["e1"] == [t.leaf.seq for t in _select(_many_windows("e1"), 5)[1].trajectories]
    assert len({tuple(seqs) for seqs in drawn.values()}) == 3
    assert all(len(seqs) == 5 for seqs in drawn.values())


def test_the_draw_is_fair() -> None:
    counts = [0] * 20
    for i in range(400):
        for t in _select(_many_windows(f"run/step/{i}"), 5)[1].trajectories:
            counts[t.leaf.seq] += 1
    assert min(counts) > 60 and max(counts) < 140  # 100 expected, standard deviation 8.7


def test_a_candidate_without_new_tokens_does_not_use_up_the_cap() -> None:
    script = Script()
    for _ in range(4):
        script.call([1], [5, 6])  # four windows with one and the same sample
    script.call([2], [7])
    script.call([3], [8], agent="a")
    _, chosen = _select(script, 3)
    assert len(chosen.trajectories) == 3
    assert [str(t.leaf.kind) for t in chosen.trajectories] == ["main", "main", "sub_agent"]


def test_a_trajectory_is_cut_after_its_last_target() -> None:
    script = Script()
    script.call([1], [5, 6])
    script.call([7, 7, 7, 7], [], parent=0)  # context limit: nothing sampled
    _, chosen = _select(script, 5)
    assert [len(t.path) for t in chosen.trajectories] == [3]


def _drawn(script: Script, cap: int, draw: str = "seeded", reserve: int = 0) -> list[tuple[int, str]]:
    return [(t.leaf.seq, str(t.leaf.kind)) for t in _select(script, cap, draw, reserve)[1].trajectories]


def test_the_order_within_a_kind_is_a_choice() -> None:
    script = Script()
    for i, length in enumerate([2, 5, 3, 9, 9]):
        script.call([100 + i] * length, [1])
    assert _drawn(script, 2, "chronological") == [(0, "main"), (1, "main")]
    assert _drawn(script, 2, "longest") == [(3, "main"), (4, "main")]
    assert _drawn(script, 3, "longest") == [(1, "main"), (3, "main"), (4, "main")]


def test_a_reserve_gives_places_to_summaries_and_what_they_leave_to_the_others() -> None:
    script = Script()
    for i in range(4):
        script.call([10 + i], [1])
        script.call([20 + i], [2], summary=True)
    script.call([30], [3], agent="a")
    free = _drawn(script, 4, "chronological")
    assert free == [(0, "main"), (2, "main"), (4, "main"), (6, "main")]
    assert _drawn(script, 4, "chronological", 1) == [(0, "main"), (1, "main_summary"), (2, "main"), (4, "main")]
    kept = _drawn(script, 8, "chronological", 6)
    assert [kind for _, kind in kept].count("main_summary") == 4
    assert [kind for _, kind in kept].count("main") == 4
