"""Every real harness, unmodified, in its sandbox, through the real gateway; only the policy is scripted.

What isn't installed fails, by the name of the make target that installs it. `make test-harnesses` runs all scenarios
but those that take minutes, with loops of ``GYRE_TEST_TURNS``; `make test` leaves out all but the loops of the two
harnesses that take seconds to start.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.harness.harness import HarnessUnavailable
from infra.harness.registry import NAMES, harness_named
from workers.harness_check.catalogue import scenarios_of
from workers.harness_check.command import check
from workers.harness_check.scenarios import Report
from workers.harness_check.tools import TOOLS

pytestmark = pytest.mark.stack

FOLDER = Path(__file__).parents[2] / ".gyre-harness"
TURNS = int(os.environ.get("GYRE_TEST_TURNS", "16"))
SLOW = () if "GYRE_TEST_TURNS" in os.environ else ("opencode", "qwen-code")
ALL = [
    (harness, scenario)
    for harness in TOOLS
    for scenario, described in scenarios_of(harness).items()
    if not described.hold_s and (harness not in SLOW or scenario == "loop")
]


async def run(harness: str, scenario: str) -> Report:
    (report,) = await check(harness, [scenario], FOLDER, TURNS)
    failed = [f"{finding.what}: {finding.detail}" for finding in report.findings if not finding.ok]
    assert not failed, f"{harness}, {scenario}: " + "; ".join(failed)
    return report


@pytest.mark.parametrize("name", NAMES)
def test_the_pinned_harness_is_installed(name: str) -> None:
    try:
        harness_named(name, FOLDER).check()
    except HarnessUnavailable as error:
        pytest.fail(f"make .gyre-harness/{name}/.installed: {error}", pytrace=False)


@pytest.mark.parametrize(("harness", "scenario"), ALL, ids=[f"{name}-{scenario}" for name, scenario in ALL])
async def test_a_real_harness_holds(harness: str, scenario: str) -> None:
    report = await run(harness, scenario)
    assert report.forks.get("unexplained", 0) == 0
    assert report.counts["resampled"] == 0
    assert scenario == "faults" or report.counts["replayed"] == 0
    if scenario == "loop":
        assert report.calls >= max(15, TURNS)
