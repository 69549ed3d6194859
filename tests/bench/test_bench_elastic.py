"""The parts of `bench elastic` without a stack: its work, its scripted harness, its arithmetic, its judgement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.harness.harness import HarnessUnavailable
from infra.harness.registry import NAMES, harness_named
from infra.tasks.harbor import list_tasks, load_task
from tests.bench.__main__ import CHECKOUT, app
from tests.bench.elastic.bench import ElasticBenchPlan, judged
from tests.bench.elastic.history import CompletedActivity, WorkflowHistory, switches
from tests.bench.elastic.paced_harness import PLUGIN, Paced
from tests.bench.elastic.prediction import TracedCall, TracedRun, speed_law
from tests.bench.elastic.tasks import PLAN, StepShape, StepWork, draw_step, session_of, warm_up, write_tasks
from workers.records.traces import TracedEpisode


def length_s(shape: StepShape, turns: tuple[tuple[int, int, float], ...]) -> float:
    """Tool time, in an ordinary episode's."""
    return sum(tool_s for _, _, tool_s in turns) / (shape.turns * shape.tool_s)


def test_a_step_has_a_long_tail_in_few_groups_and_is_the_same_for_every_policy() -> None:
    shape = StepShape()
    for seed in range(8):
        step = draw_step(shape, seed=seed)
        assert step == draw_step(shape, seed=seed)
        lengths = [[length_s(shape, episode.turns) for episode in group] for group in step]
        middle = median(length for group in lengths for length in group)
        long = [[length for length in group if length > 2 * middle] for group in lengths]
        assert sum(bool(group) for group in long) == shape.tail_groups
        assert sum(map(len, long)) == shape.tail_groups * shape.group_size // 2
        assert max(max(group) for group in lengths) / middle == pytest.approx(shape.tail[1], rel=0.2)


def test_every_group_has_a_gradient_and_another_step_of_a_seed_has_the_same_tail_tasks() -> None:
    shape = StepShape()
    first, second = draw_step(shape, seed=3), draw_step(shape, seed=3, step=1)
    assert first != second
    for step in (first, second):
        assert all(len({episode.reward for episode in group}) == shape.group_size for group in step)

    def tail(step: StepWork) -> set[int]:
        most = [max(length_s(shape, episode.turns) for episode in group) for group in step]
        return set(sorted(range(len(most)), key=lambda group: -most[group])[: shape.tail_groups])

    assert tail(first) == tail(second)


def test_every_episode_of_every_run_finds_its_own_turns(tmp_path: Path) -> None:
    shape = StepShape(groups=3, group_size=2, tail_groups=1)
    work = [warm_up(shape), draw_step(shape, seed=1)]
    write_tasks(tmp_path, {"colocate-r0": work, "async-1-r0": work})
    assert len(list_tasks(tmp_path)) == 3
    for group, name in enumerate(list_tasks(tmp_path)):
        task = load_task(tmp_path / name)
        plan = json.loads((task.environment_folder / PLAN).read_text())
        for run in ("colocate-r0", "async-1-r0"):
            for index in range(2):
                mine = plan["episodes"][plan["sessions"][session_of(run, 1, group, index)]]
                expected = work[1][group][index]
                assert (tuple(map(tuple, mine["turns"])), mine["reward"]) == (expected.turns, expected.reward)
        assert (session_of("colocate-r0", 0, group, 0) in plan["sessions"]) == (group == 0)


def test_the_scripted_harness_is_a_choice_only_where_the_benchs_plugin_is_found(tmp_path: Path) -> None:
    assert Paced.name not in NAMES
    with pytest.raises(HarnessUnavailable):
        harness_named(Paced.name, tmp_path)
    ask = f"from infra.harness.registry import harness_named; print(harness_named({Paced.name!r}).command('', None))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), str(PLUGIN)])}
    told = subprocess.run(
        [sys.executable, "-c", ask], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "/gyre/paced.py" in told.stdout


def test_switches_are_read_from_a_cells_history_and_a_runs_first_state_is_none() -> None:
    def order(name: str, at: float, seconds: float, run: str) -> list[CompletedActivity]:
        desired = {"desired": {"context": {"run": run}}}
        return [
            CompletedActivity("drain_cell", at, {}, completed=at),
            CompletedActivity(name, at, desired, completed=at + seconds),
        ]

    history = WorkflowHistory(began=0.0)
    for name, at, seconds, run in (
        ("serve_rollout", 5, 9, "a"),
        ("prepare_training", 20, 2, "a"),
        ("serve_rollout", 40, 1, "a"),
        ("serve_rollout", 50, 0.5, "a"),
        ("prepare_training", 60, 9, "b"),
        ("serve_rollout", 80, 3, "b"),
    ):
        history.activities += order(name, at, seconds, run)
    found = switches(history)
    assert [c.seconds for c in found.out] == [2]
    assert [c.seconds for c in found.back] == [1, 3]
    assert [c.seconds for c in found.publish] == [0.5]
    assert found.between(30, 82) == 1


def answered_s(episodes: float, tools: float, alone: float, slope: float) -> float:
    """Seconds of a call when it takes so much longer for each that is answered with it, found by iteration."""
    call = alone + slope
    for _ in range(200):
        call = alone + slope * episodes * call / (tools + call)
    return call


@pytest.mark.parametrize(("alone", "slope"), [(0.5, 0.0), (0.4, 0.1), (0.1, 0.6)])
def test_the_speed_alone_is_found_from_calls_in_more_and_less_company(alone: float, slope: float) -> None:
    # A turn is 1.5 s of tool and a call. Four episodes for 300 s, then twelve of them, turns spread evenly.
    calls, tools = [], 1.5
    for begin, company in ((0.0, 4), (300.0, 12)):
        call = answered_s(company, tools, alone, slope)
        for episode in range(company):
            at = begin + episode * (tools + call) / company
            while at + call < begin + 300:
                calls.append(TracedCall(at, call))
                at += tools + call
    active_s = sum(tools + call.seconds for call in calls)
    traced = TracedEpisode(run="r", step=1, group=0, task="t", start=0.0, active_s=active_s, wall_s=active_s)
    found = speed_law([TracedRun([traced], calls)], cells=1, capacity=8)
    full = tools + answered_s(8, tools, alone, slope)
    assert found.solo_speedup == pytest.approx(full / (tools + alone), rel=0.05)
    assert found.tool_share == pytest.approx(tools / full, rel=0.05)


def test_the_best_static_split_is_the_baseline_and_every_limit_is_judged() -> None:
    def row(seconds: float, predicted: float) -> dict[str, Any]:
        error = predicted / seconds - 1
        return {"step_s": [seconds] * 5, "median_s": seconds, "prediction": {"error": error}}

    rows = {"predictive": row(40, 41), "colocate": row(52, 50), "async-1": row(90, 88), "async-2": row(49, 50)}
    result = judged(rows)
    assert (result["best_async"], result["holds"]) == ("async-2", False)
    assert [limit["holds"] for limit in result["limits"][:3]] == [True, False, True]
    rows["async-2"] = row(50, 44)
    result = judged(rows)
    assert [limit["limit"] for limit in result["limits"] if not limit["holds"]] == [
        "the simulator is within 10% of async-2"
    ]


def test_async_stands_for_every_static_split() -> None:
    plan = ElasticBenchPlan(policies=("predictive", "async"), cells=4)
    assert plan.variants() == ["predictive", "async-1", "async-2", "async-3"]
    assert plan.scheduler("async-3").training_cells == 3


def test_a_policy_that_does_not_exist_is_refused_before_anything_starts() -> None:
    result = CliRunner().invoke(app, ["elastic", "--policies", "predictive,fast"])
    assert result.exit_code == 2
    assert "'fast'" in result.stderr
    assert "watermark" in result.stderr


def test_a_bench_that_does_not_exist_is_a_fault_of_use() -> None:
    result = CliRunner().invoke(app, ["latency"])
    assert result.exit_code == 2
    assert "'latency'" in result.stderr
