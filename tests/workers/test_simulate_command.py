"""`gyre simulate` as a person uses it: named workloads, a run's own trace, a drawing, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from infra.state.blobs import BlobStore
from workers.cli import app
from workers.errors import UsageError
from workers.records.traces import TracedEpisode, export_trace, read_trace
from workers.simulate.compare import batchwise, best_split, compare, priced
from workers.simulate.fitting import Extent, Hypothesis, fits, hours
from workers.simulate.tables import lines_of
from workers.simulate.trace import steps_of, works_of
from workers.simulate.workloads import PUBLISHED, PUBLISHED_HOURS, WORKLOADS, Range, explanation
from workflows.contracts.configuration import SchedulerConfig
from workflows.simulation.simulator import Simulation
from workflows.simulation.workload import PoolModel, SimulatedEpisode, SimulatedGroup, Steps

COLD = {"cells": 2, "capacity": 2, "train_tokens_per_s": 100.0}


def lines(path: Path) -> Path:
    """Two steps of two groups of two, run one after the other at 10 and 40 s an episode."""
    rows = []
    for step in range(2):
        for group in range(2):
            for index in range(2):
                seconds = 10.0 if group == 0 else 40.0
                row = TracedEpisode(
                    run="r",
                    step=step,
                    group=group,
                    task=f"t{group}",
                    start=100.0 * step,
                    active_s=seconds,
                    wall_s=seconds,
                    sampled_tokens=int(seconds * 10),
                )
                rows.append({**row.model_dump(), "index": index})
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def gyre(*words: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_trace_is_simulated_under_every_policy_and_drawn(tmp_path: Path) -> None:
    trace, png = lines(tmp_path / "trace.jsonl"), tmp_path / "cells.png"
    options = ["--cells", "2", "--capacity", "2", "--training", "100", "--update", "1", "--png", str(png)]
    found = json.loads(gyre("--trace", str(trace), *options, "--json"))
    (compared,) = found["compared"]
    assert set(compared["policies"]) == {"colocate", "async", "watermark", "predictive"}
    for row in compared["policies"].values():
        assert row["step_s"] >= compared["lower_bound"]["step_s"] - 1e-6
        assert 0 < row["utilisation"] <= 1
    assert compared["clairvoyant"]["step_s"] <= compared["policies"]["predictive"]["step_s"]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "lower bound" in gyre("--trace", str(trace), *options)


def test_fixed_seconds_losses_and_sizes_are_options(tmp_path: Path) -> None:
    trace = lines(tmp_path / "trace.jsonl")
    options = ["--trace", str(trace), "--cells", "2", "--capacity", "2", "--training", "100", "--poll", "0", "--json"]

    def total(*more: str) -> float:
        (compared,) = json.loads(gyre(*options, *more))["compared"]
        return float(compared["policies"]["colocate"]["total_s"])

    plain = total()
    assert total("--open", "5", "--update", "3") == pytest.approx(plain + 2 * 8)
    assert total("--grade", "30") > plain
    # What is said to be start-up is no longer work.
    assert total("--start", "4") == pytest.approx(plain)
    small = ["--claim", "0.05", "--micro-step", "100"]
    assert total(*small, "--overhead", "1") > total(*small)
    assert total("--lose", "1@2") > total("--lose", "1@2:20") > plain
    assert total(*small, "--resize", "4@60") < total(*small) < total(*small, "--resize", "1@60")
    for words in (["--lose", "5@1"], ["--lose", "x"], ["--resize", "0@5"], ["--resize", "3"]):
        result = CliRunner().invoke(app, ["simulate", *options, *words])
        assert result.exit_code == 2, words
        assert words[0] in result.stderr


def test_a_trace_without_its_pool_or_with_a_broken_line_is_refused_by_name(tmp_path: Path) -> None:
    trace = lines(tmp_path / "trace.jsonl")
    result = CliRunner().invoke(app, ["simulate", "--trace", str(trace), "--cells", "2"])
    assert result.exit_code == 2
    assert "--capacity, --training" in result.stderr
    pool = ["--cells", "2", "--capacity", "2", "--training", "100", "--solo", "2", "--tools", "0.7"]
    result = CliRunner().invoke(app, ["simulate", "--trace", str(trace), *pool])
    assert result.exit_code == 2
    assert "1.43 times as fast at most" in result.stderr
    trace.write_text(trace.read_text() + '{"run": "r"}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="line 9"):
        read_trace(trace)


def test_a_workload_that_does_not_exist_is_refused_with_the_ones_that_do() -> None:
    result = CliRunner().invoke(app, ["simulate", "nothing"])
    assert result.exit_code == 2
    assert "deepswe-122b" in result.stderr
    assert CliRunner().invoke(app, ["simulate"]).exit_code == 2
    assert all(name in gyre("list") for name in WORKLOADS)


def test_every_parameter_of_a_workload_says_where_it_is_from() -> None:
    for workload in WORKLOADS.values():
        own = {**workload.pool.model_dump(exclude_defaults=True), **workload.work.model_dump(exclude_defaults=True)}
        assert set(own) - {"poll_s"} <= set(workload.sources)
        assert workload.name in PUBLISHED


def test_the_fitted_workload_reproduces_the_published_baselines() -> None:
    """And only those were fitted: nothing here holds the watermark policy against anything."""
    for staleness in (0, 1):
        pool, drawn, split = WORKLOADS["nl2repobench-2.4t"].at(staleness)
        steps = drawn.draw()
        for policy in ("async", "colocate"):
            config = priced(pool).model_copy(update={"policy": policy, "training_cells": split})
            run = Simulation(pool, steps, config, staleness, pipeline=batchwise(staleness)).run()
            assert run.total_s / 3600 == pytest.approx(PUBLISHED_HOURS[policy], rel=0.01), staleness


def test_a_fit_gets_back_the_share_of_training_that_made_the_times() -> None:
    hypothesis = Hypothesis(0.5, 0.8, 1.2, 2, 2.0, 0, 1)
    true = {name: hours(hypothesis, 0.5, name, Extent(cells=4, steps=1)) for name in ("async", "colocate")}
    found = list(fits(hypothesis, true, Extent(cells=4, steps=1, of=1)))
    assert min(abs(fit.training / 0.5 - 1) for fit in found) < 0.1


def test_a_figure_within_a_published_range_has_no_error() -> None:
    published = Range(1.2, 1.8)
    assert published.error(1.5) == 0
    assert published.error(0.6) == pytest.approx(-0.5)
    assert published.error(3.6) == pytest.approx(1.0)


def test_the_best_split_is_the_best() -> None:
    group = SimulatedGroup("task", (SimulatedEpisode(10.0, 1000.0),) * 2)
    steps: Steps = [[group] * 4] * 2
    pool = PoolModel(**{**COLD, "cells": 4}, switch_out_s=4, switch_in_s=2, update_s=3, micro_step_tokens=500, poll_s=0)
    times = {}
    for cells in (1, 2, 3):
        split = SchedulerConfig(policy="async", training_cells=cells)
        times[cells] = Simulation(pool, steps, split).run().total_s
    assert best_split(pool, steps, SchedulerConfig()) == min(times, key=lambda cells: times[cells])


def test_baselines_that_overlap_steps_are_told_from_batchwise_ones_and_from_the_bound() -> None:
    """A tail that the next step's episodes fill leaves nothing to win; one that stays empty does."""
    groups = [
        SimulatedGroup("short", (SimulatedEpisode(10.0, 1.0),) * 2),
        SimulatedGroup("long", (SimulatedEpisode(90.0, 1.0),)),
    ]
    pool = PoolModel(**COLD, poll_s=0)
    on_policy, overlapped = (compare(pool, [groups] * 6, max_staleness=level) for level in (0, 1))
    assert on_policy.batchwise == {}
    assert overlapped.usual("colocate").total_s == pytest.approx(on_policy.runs["colocate"].total_s)
    assert overlapped.runs["colocate"].total_s < 0.9 * overlapped.usual("colocate").total_s
    found = overlapped.as_json()
    for over in ("colocate", "async"):
        assert found["at_most"][over] >= found["policies"]["predictive"]["speedup"][over] - 1e-9
    (table,) = [line for line in lines_of(found) if "no schedule" in line]
    assert f"{found['at_most']['colocate']:.2f}× colocate" in table


def test_an_error_above_a_tenth_says_what_would_explain_it() -> None:
    for over in ("async", "colocate"):
        assert explanation(over, 0.05, 1) == ""
        assert explanation(over, 0.2, 1)
        assert explanation(over, -0.2, 0)


def test_predictive_is_not_worse_than_the_watermark_rule_on_the_named_workloads() -> None:
    for name, workload in WORKLOADS.items():
        steps = workload.work.model_copy(update={"steps": 3}).draw()
        for staleness in (0, 1):
            compared = compare(workload.pool, steps, max_staleness=staleness, policies=("watermark", "predictive"))
            ratio = compared.runs["predictive"].total_s / compared.runs["watermark"].total_s
            assert ratio < 1.02, (name, staleness)


def test_company_that_slowed_the_recorded_episodes_is_undone(tmp_path: Path) -> None:
    """Four episodes on four places are as fast as the simulator's full cell; one alone had done more work."""
    episodes = read_trace(lines(tmp_path / "trace.jsonl"))
    pool = PoolModel(**COLD, solo_speedup=2.0)
    works = works_of(episodes, pool)
    # 10 s with all places taken; then 30 s with half of them: 1 / (1/2 + 1/2 · 1/2) as fast.
    assert works[0] == pytest.approx(10)
    assert works[2] == pytest.approx(10 + 30 / 0.75)
    assert works_of(episodes, PoolModel(**COLD))[2] == 40
    (first, _) = steps_of(episodes, pool)
    assert [group.task for group in first] == ["t0", "t1"]


def test_a_run_that_is_sealed_is_exported_line_by_line(tmp_path: Path) -> None:
    blobs = BlobStore(str(tmp_path / "blobs"))
    seal = {
        "episode": "r/000001/002/3",
        "task": "tasks#7",
        "version": 1,
        "records_ref": "",
        "calls": 0,
        "outcome": "timed_out",
        "reward": 0.0,
        "exit": {"active_s": 12.5, "held_s": 1.0, "wall_s": 14.0},
    }
    file = tmp_path / "out" / "trace.jsonl"
    assert export_trace(blobs, "r", [seal], file) == 1
    (episode,) = read_trace(file)
    assert (episode.step, episode.group, episode.task, episode.active_s) == (1, 2, "tasks#7", 12.5)


def test_the_commands_of_the_simulators_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand there, except that a named workload is cut to one step."""
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "trace.jsonl")
    text = (Path(__file__).parents[2] / "docs/simulator.md").read_text(encoding="utf-8")
    commands = [line.split()[2:] for line in text.splitlines() if line.startswith("    gyre simulate ")]
    assert len(commands) == 4
    for words in commands:
        assert gyre(*words, *([] if "--trace" in words else ["--steps", "1"]))
    assert (tmp_path / "cells.png").exists()
