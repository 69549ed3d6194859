"""The gauges of a step, from what groups and claims have stored to its manifest, the metrics and `gyre gauges`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import orjson
import pytest
from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig
from temporalio.testing import ActivityEnvironment

from activities.runs import RunActivities
from activities.services import Services
from infra.settings import Settings
from infra.state.blobs import BlobStore
from infra.state.record_names import latest_name, step_name
from infra.temporal import connect
from tests.processes import free_port
from trajectory.gauges import Gauges
from trajectory.stats import GroupStats
from workflows.contracts.orders import CommitInput, Committed, GaugesInput
from workflows.contracts.results import Outcome, StepResult

GYRE = str(Path(sys.executable).parent / "gyre")


def group_stats(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "valid_episodes": 2,
        "excluded_episodes": 1,
        "mean_reward": 0.5,
        "reason": "",
        "micro_steps": 1,
        "leaves": {"main": 2},
        "trajectories": {"main": 2},
        "sampled_tokens": 100,
        "sampled_by_kind": {"main": 80, "dead": 20},
        "trained_tokens": 80,
        "left_out": {"dead": 20},
        "dead_tokens": 20,
        "duplicates": 0,
        "packed_tokens": 200,
        "trained_by_version": {"6": 20, "7": 60},
        "oldest_version": 6,
        "newest_version": 7,
        "active_s": 1.0,
        "held_s": 0.0,
        "malformed": {"positive": {"calls": 4, "malformed_calls": 1, "malformed_spans": 3}},
        "lengths": {"16": {"episodes": 3, "excluded": 1}},
    }
    return GroupStats.model_validate({**fields, **changes}).model_dump()


def micro_step(**changes: Any) -> dict[str, Any]:
    return {
        "trajectories": 1,
        "targets": 40,
        "units": 1,
        "positive": 1,
        "sum_delta": 4e-5,
        "sum_abs_delta": 4e-5,
        "max_token_delta": 1e-6,
        "token_delta": {"49": 40},
        "sequence_log_ratio": {"7": {"49": 1}},
        **changes,
    }


class Recorded:
    """A step whose groups and claims are in a real blob store."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(home=folder)
        self.blobs = BlobStore(self.settings.blobs)

    def put(self, value: Any) -> str:
        return self.blobs.put(orjson.dumps(value))

    def group(self, task: str, excluded: dict[str, int], **changes: Any) -> str:
        return self.put({"task": task, "stats": group_stats(**changes), "excluded": excluded})

    def result(self, **changes: Any) -> StepResult:
        fields = {"run": "r1", "step": 4, "version": 8, "train": True, "candidate_ref": "c", "episodes": 6}
        counts = {"valid": 4, "passed": 2, "mean_reward": 0.5, "outcomes": {"completed": 4}}
        return StepResult.model_validate({**fields, **counts, **changes})

    async def commit(self, order: CommitInput, runtime: Runtime | None = None) -> Committed:
        environment = ActivityEnvironment()
        if runtime is not None:
            environment.metric_meter = runtime.metric_meter
        services = Services(self.settings, None, None)  # type: ignore[arg-type]  # neither is asked
        committed: Committed = await environment.run(RunActivities(services).commit_candidate, order)
        return committed

    def order(self, groups: list[str], claims: list[str], result: StepResult | None = None) -> CommitInput:
        gauges = GaugesInput(version=7, groups=groups, claims=claims)
        result = result or self.result()
        return CommitInput(run="r1", step=4, version=8, candidate_ref="c", result=result, gauges=gauges)

    def gyre(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "GYRE_HOME": str(self.settings.root), "COLUMNS": "200"}
        return subprocess.run(
            [GYRE, *arguments], env=environment, capture_output=True, text=True, timeout=90, check=False
        )


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


async def test_groups_and_claims_add_up_in_the_manifest_and_in_latest(recorded: Recorded) -> None:
    groups = [
        recorded.group("a#0", {"evaluator_failed": 1}),
        recorded.group("a#1", {"infra_failed": 1}, reason="no_variance", trained_by_version={}, mean_reward=1.0),
    ]
    claims = [recorded.put({"m1": micro_step()}), recorded.put({"m2": micro_step(max_token_delta=2e-6)})]
    committed = await recorded.commit(recorded.order(groups, claims))

    gauges = Gauges.model_validate_json(recorded.blobs.get(committed.gauges_ref))
    assert gauges.excluded == {"evaluator_failed": 1, "infra_failed": 1}
    assert gauges.rewards == {"a#0": {"episodes": 2, "reward": 1.0}, "a#1": {"episodes": 2, "reward": 2.0}}
    assert (gauges.trained, gauges.without_gradient, gauges.left_out) == ({"main": 80}, {"main": 80}, {"dead": 40})
    assert gauges.trained_by_lag == {"0": 60, "1": 20}
    assert gauges.groups_without_gradient == {"no_variance": 1}
    assert committed.gauges["token_abs"] == 1e-6
    assert committed.gauges["token_p99"] <= committed.gauges["token_max"] == 2e-6
    assert committed.gauges["stale"] == 0.25
    assert "unread" not in committed.gauges
    for name in (step_name("r1", 4), latest_name("r1")):
        manifest = StepResult.model_validate_json(recorded.blobs.get_named(name))
        assert (manifest.gauges, manifest.gauges_ref) == (committed.gauges, committed.gauges_ref)
    assert await recorded.commit(recorded.order(groups, claims)) == committed, "a repeated commit changes nothing"


async def test_a_micro_step_that_was_trained_twice_counts_once(recorded: Recorded) -> None:
    lost = recorded.put({"m1": micro_step(sum_abs_delta=8e-5), "m2": micro_step()})
    again = recorded.put({"m1": micro_step()})
    committed = await recorded.commit(recorded.order([], [lost, again]))
    gauges = Gauges.model_validate_json(recorded.blobs.get(committed.gauges_ref))
    assert (gauges.loss["targets"], gauges.loss["sum_abs_delta"]) == (80, pytest.approx(8e-5))


async def test_lost_statistics_are_counted_and_hold_nothing_back(recorded: Recorded) -> None:
    gone = f"sha256:{'0' * 64}"
    damaged = recorded.put({"m1": micro_step()})
    digest = damaged.removeprefix("sha256:")
    Path(recorded.settings.blobs, "sha256", digest[:2], digest).write_text("{}")
    committed = await recorded.commit(recorded.order([gone, recorded.group("a#0", {})], [damaged]))
    assert committed.gauges["unread"] == 2
    assert committed.gauges["trained"] == 0.8
    assert recorded.blobs.get_named(latest_name("r1"))


async def test_a_commit_by_a_workflow_that_knows_no_gauges_goes_through(recorded: Recorded) -> None:
    order = recorded.order([], []).model_copy(update={"gauges": None})
    assert await recorded.commit(order) == Committed()
    assert recorded.blobs.get_named(step_name("r1", 4))


async def test_a_full_result_stays_small(recorded: Recorded) -> None:
    """All names that a step's result can have, with long values; more than 2 KB of it would be in every history."""
    loss = micro_step(negative=1, clipped_positive=1, clipped_negative=1, outside_positive=1, outside_negative=1)
    loss |= {"truncated": 1, "sum_abs_sequence_log_ratio": 1.23456789e-5, "max_sequence_log_ratio": 1.23456789e-5}
    malformed = {sign: {"calls": 7, "malformed_calls": 3, "malformed_spans": 3} for sign in ("positive", "negative")}
    groups = [recorded.group("a#0", {"cancelled": 1}, malformed=malformed), f"sha256:{'0' * 64}"]
    result = recorded.result(
        run="r" * 41,
        candidate_ref=f"sha256:{'f' * 64}",
        outcomes=dict.fromkeys((outcome.value for outcome in Outcome), 9999),
        groups_without_gradient=dict.fromkeys(("too_few", "no_variance", "no_tokens"), 512),
        grad_norm=0.12085341727154292,
        satellites=[f"cell-{i}" for i in range(1, 8)],
        train_stats={name: 1.234567890123456e-5 for name, value in loss.items() if not isinstance(value, dict)},
    )
    committed = await recorded.commit(recorded.order(groups, [recorded.put({"m1": loss})], result))
    assert len(committed.gauges) == 24
    full = result.model_copy(update={"gauges": committed.gauges, "gauges_ref": committed.gauges_ref})
    assert len(full.model_dump_json()) < 2048


async def test_a_scrape_sees_the_newest_step_and_nothing_of_the_one_before(recorded: Recorded) -> None:
    port = free_port()
    runtime = Runtime(telemetry=TelemetryConfig(metrics=PrometheusConfig(bind_address=f"127.0.0.1:{port}")))

    def scrape() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("gyre_")}

    def value(found: dict[str, float], name: str, *labels: str) -> float:
        (one,) = [v for key, v in found.items() if key.split("{")[0] == name and all(label in key for label in labels)]
        return one

    first = recorded.order([recorded.group("a#0", {"evaluator_failed": 1})], [recorded.put({"m1": micro_step()})])
    await recorded.commit(first, runtime)
    found = scrape()
    assert value(found, "gyre_token_max", 'run="r1"', 'phase="train"') == 1e-6
    assert value(found, "gyre_excluded_episodes", 'outcome="evaluator_failed"') == 1
    assert value(found, "gyre_trained_tokens_by_lag", 'lag="1"') == 20
    assert value(found, "gyre_step") == 4

    quiet = recorded.group("a#0", {}, excluded_episodes=0, trained_by_version={}, reason="no_variance")
    await recorded.commit(recorded.order([quiet], [], recorded.result(step=5)), runtime)
    found = scrape()
    assert value(found, "gyre_excluded_episodes", 'outcome="evaluator_failed"') == 0
    assert value(found, "gyre_groups_without_gradient", 'reason="no_variance"') == 1
    assert math.isnan(value(found, "gyre_token_max")), "nothing was trained: there is no mismatch to tell, and no zero"


async def test_an_address_that_metrics_cannot_have_is_named(recorded: Recorded) -> None:
    with pytest.raises(ValueError, match="GYRE_METRICS_ADDRESS=nowhere:1"):
        await connect(recorded.settings, "nowhere:1")


async def test_gyre_gauges_shows_a_run_and_a_step(recorded: Recorded) -> None:
    await recorded.commit(
        recorded.order([recorded.group("a#0", {"cancelled": 1})], [recorded.put({"m1": micro_step()})])
    )
    (row,) = json.loads(recorded.gyre("gauges", "r1", "--json").stdout)
    assert (row["step"], row["train"], row["token_max"]) == (4, True, 1e-6)
    step = json.loads(recorded.gyre("gauges", "r1", "4", "--json").stdout)
    assert step["summary"]["stale"] == 0.25
    assert step["rewards"] == {"a#0": {"episodes": 2.0, "reward": 1.0}}
    shown = recorded.gyre("gauges", "r1", "4").stdout
    for words in ("token_max", "1e-06", "dead", "16 sampled tokens", "cancelled 1", "a#0", "0.500"):
        assert words in shown
    assert "train" in recorded.gyre("gauges", "r1").stdout


@pytest.mark.parametrize("arguments", [["r2"], ["r1", "9"], ["r1", "4"]])
async def test_gauges_that_are_not_there_are_named(recorded: Recorded, arguments: list[str]) -> None:
    await recorded.commit(recorded.order([], []).model_copy(update={"gauges": None}))
    done = recorded.gyre("gauges", *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and all(argument in done.stderr for argument in arguments)
