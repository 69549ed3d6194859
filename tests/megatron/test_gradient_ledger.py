"""Which sums may become a gradient."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.megatron.coverage import check_coverage
from infra.megatron.protocol import ReplicaError

REFS = [f"m{i}" for i in range(8)]


@given(owners=st.lists(st.sampled_from("abc"), min_size=0, max_size=8))
def test_disjoint_sums_that_cover_the_step_are_accepted(owners: list[str]) -> None:
    step = REFS[: len(owners)]
    check_coverage(step, {name: [r for r, o in zip(step, owners, strict=True) if o == name] for name in "abc"})


@given(sums=st.dictionaries(st.sampled_from("abc"), st.lists(st.sampled_from(REFS), unique=True)))
def test_anything_else_is_refused_and_names_what_is_missing_and_doubled(sums: dict[str, list[str]]) -> None:
    counts = {ref: sum(ref in ids for ids in sums.values()) for ref in REFS}
    missing, doubled = {r for r in REFS if counts[r] == 0}, {r for r in REFS if counts[r] > 1}
    if not missing and not doubled:
        check_coverage(REFS, sums)
        return
    with pytest.raises(ReplicaError) as refusal:
        check_coverage(REFS, sums)
    assert set(refusal.value.problem.missing) == missing
    assert set(refusal.value.problem.doubled) == doubled


def test_a_micro_step_of_another_step_is_refused() -> None:
    with pytest.raises(ReplicaError, match="not of this step"):
        check_coverage(REFS, {"a": [*REFS, "stranger"]})
