"""The training half of `bench trajectory`: what it counts, how it prices, and what it finds at a small size."""

from __future__ import annotations

import pytest

from tests.bench.training import SMALL, TrainingBenchSizes, _cost, _fitted, measure

PRICES = (0.01, 5e-5, 8e-8, 2e-5)


def test_prices_are_found_again_from_what_they_make() -> None:
    known = [(1, 1000, 400_000, 90), (1, 1000, 90_000, 150), (1, 400, 30_000, 160), (1, 3000, 900_000, 80)]
    assert _fitted([(counts, _cost(counts, PRICES)) for counts in known]) == pytest.approx(PRICES, rel=1e-6)


def test_a_price_is_never_negative() -> None:
    known = [((1, 1000, 10_000, 10), 1.0), ((1, 1000, 10_000, 400), 0.9), ((1, 500, 2_000, 10), 0.5)]
    prices = _fitted(known)
    assert min(prices) >= 0 and prices[3] == 0
    assert _cost((1, 1000, 10_000, 10), prices) == pytest.approx(0.95, rel=0.1)


def test_sharing_saves_what_the_counts_say_and_changes_no_gradient() -> None:
    result = measure(TrainingBenchSizes.model_validate({**SMALL, "windows": (3, 6), "repetitions": 2}))
    assert result["gradient_distance"] < 1e-5
    rows = {(row["windows"], row["cap"], row["prefixes"]): row for row in result["rows"]}
    assert len(rows) == 8
    for windows in (3, 6):
        for cap in (5, None):
            apart, once = rows[windows, cap, "written out"], rows[windows, cap, "once"]
            assert (apart["targets"], apart["trajectories"]) == (once["targets"], once["trajectories"])
            assert once["tokens"] < apart["tokens"] and once["pairs"] < apart["pairs"]
        assert rows[windows, 5, "once"]["trajectories"] == 10 < rows[windows, None, "once"]["trajectories"]
    # the limits themselves are the benchmark's: here other work may run beside the test
    assert result["worst_prediction_error"] < 0.5
    everything = [saving for saving in result["compute_once"] if saving["cap"] is None]
    assert len(everything) == 2
    assert all(saving["ideal"] > 0.25 and saving["measured"] > 0.5 * saving["ideal"] for saving in everything)
    assert result["published_cap_saving"] == 0.252
    assert 0 < result["cap_saving"]["3"] < result["cap_saving"]["6"]
