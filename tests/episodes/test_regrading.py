"""`gyre regrade` on real workspaces, blobs and sandboxes: a second verdict, never in place of the first."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from temporalio.testing import ActivityEnvironment

from activities.episodes.grading import GradingActivities
from activities.services import Services
from infra.episodes.grading import evaluator_of
from infra.episodes.workspace import pack_workspace
from infra.settings import Settings
from infra.state.blobs import BlobStore
from infra.state.record_names import seal_name
from infra.tasks.harbor import load_task
from workers.errors import UsageError
from workers.records.regrade import LaterVerdict, regrade
from workflows.contracts.results import GradeInput

pytestmark = pytest.mark.stack

GYRE = str(Path(sys.executable).parent / "gyre")
BROKEN = "echo the verifier is broken >&2; exit 1"
MENDED = (
    'grep -q fox out.txt && echo 1 > /logs/verifier/reward.txt || echo "{\\"a\\": 0.25}" > /logs/verifier/reward.json'
)

TASK_TOML = """schema_version = "1.3"
[verifier]
timeout_sec = 20.0
[environment]
memory_mb = 512
"""


class Run:
    """Sealed episodes of run ``r1``, as `process_group` leaves them, of the tasks ``0-fox`` and ``1-hen``."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(home=folder / "home")
        self.blobs = BlobStore(self.settings.blobs)
        self.tasks = folder / "tasks"
        for name in ("0-fox", "1-hen"):
            (self.tasks / name / "tests").mkdir(parents=True)
            (self.tasks / name / "task.toml").write_text(TASK_TOML)
            (self.tasks / name / "instruction.md").write_text("Write `out.txt`.\n")
        self.evaluator(BROKEN)

    def evaluator(self, test: str) -> None:
        for task in self.tasks.iterdir():
            (task / "tests" / "test.sh").write_text(f"#!/bin/sh\n{test}\n")

    def seal(self, index: int, text: str | None = "fox\n", *, task: int = 0, step: int = 1, **changes: Any) -> str:
        episode, ref = f"r1/{step:06d}/000/{index:02d}", ""
        if text is not None:
            workspace = self.settings.root / f"workspace-{index}"
            workspace.mkdir(parents=True)
            (workspace / "out.txt").write_text(text)
            ref = self.blobs.put(pack_workspace(workspace))
            shutil.rmtree(workspace)
        records = changes.pop("records", episode)
        ended = {"outcome": "completed", "calls": 2, "gradeable": text is not None, "active_s": 1.0, "held_s": 0.0}
        ended |= {"wall_s": 1.0, "records": records, "workspace_ref": ref, "detail": ""}
        seal = {"episode": episode, "outcome": "evaluator_failed", "reward": None, "exit": ended, "detail": "broken"}
        seal |= {"task": f"{self.tasks}#{task}", "step": step, "version": 0, "records_ref": "", "calls": 2, **changes}
        self.blobs.put_named(seal_name(records), orjson.dumps(seal))
        return episode

    def gyre(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "GYRE_HOME": str(self.settings.root), "COLUMNS": "250"}
        return subprocess.run(
            [GYRE, *arguments], env=environment, capture_output=True, text=True, timeout=90, check=False
        )

    def seals(self) -> dict[str, bytes]:
        return {name: self.blobs.get_named(name) for name in self.blobs.names("episodes")}

    def shown(self) -> dict[str, dict[str, Any]]:
        return {seal["episode"]: seal for seal in json.loads(self.gyre("episodes", "r1", "--json").stdout)}


@pytest.fixture
def run(folder: Path) -> Run:
    return Run(folder)


async def test_a_mended_evaluator_gives_a_verdict_beside_the_old_one(run: Run) -> None:
    fox, hen = run.seal(0), run.seal(1, "hen\n")
    before = run.seals()
    run.evaluator(MENDED)
    done = run.gyre("regrade", "r1", "--outcome", "evaluator_failed")
    assert done.returncode == 0, done.stderr
    assert f"{fox}  was evaluator_failed, excluded; regraded" in done.stdout
    assert run.seals() == before, "what was recorded stays"

    shown = run.shown()
    (verdict,) = shown[fox]["verdicts"]
    assert (shown[fox]["outcome"], shown[fox]["reward"]) == ("evaluator_failed", None)
    assert (verdict["outcome"], verdict["reward"]) == ("completed", 1.0)
    assert verdict["evaluator"] == evaluator_of(load_task(run.tasks / "0-fox"))
    assert verdict["at"].startswith("20") and "@" in verdict["by"]
    (verdict,) = shown[hen]["verdicts"]
    assert (verdict["reward"], verdict["details"]) == (0.25, {"a": 0.25})
    text = run.gyre("episodes", "r1").stdout
    assert "reward excluded" in text and "reward 1.00, evaluator 0-fox@" in text


async def test_the_same_code_gives_the_same_reward_as_the_activity(run: Run) -> None:
    run.evaluator(MENDED)
    run.seal(0, "hen\n")
    (verdict,) = await regrade(run.settings, "r1")
    grading = GradingActivities(Services(run.settings, None, None))  # type: ignore[arg-type]  # neither is asked
    order = GradeInput(episode="e", task_set=str(run.tasks), task=0, workspace_ref=verdict.workspace_ref)
    graded = await ActivityEnvironment().run(grading.grade_episode, order)
    assert (graded.reward, graded.evaluator) == (verdict.reward, verdict.evaluator) == (0.25, verdict.evaluator)


async def test_an_evaluator_that_fails_again_leaves_the_episode_excluded(run: Run) -> None:
    episode = run.seal(0)
    done = run.gyre("regrade", "r1", "--json")
    assert done.returncode == 1
    (verdict,) = json.loads(done.stdout)
    assert (verdict["outcome"], verdict["reward"]) == ("evaluator_failed", None)
    assert "the verifier is broken" in verdict["detail"]
    run.evaluator(MENDED)
    assert run.gyre("regrade", "r1").returncode == 0
    failed, passed = run.shown()[episode]["verdicts"]
    assert (failed["reward"], passed["reward"]) == (None, 1.0), "oldest first, none in place of another"
    assert failed["evaluator"] != passed["evaluator"]


async def test_a_graded_episode_can_be_regraded_and_keeps_its_reward(run: Run) -> None:
    run.evaluator(MENDED)
    episode = run.seal(0, "hen\n", outcome="completed", reward=1.0)
    await regrade(run.settings, "r1", episode=episode)
    shown = run.shown()[episode]
    assert (shown["reward"], [verdict["reward"] for verdict in shown["verdicts"]]) == (1.0, [0.25])


async def test_a_missing_workspace_is_named_after_the_others_were_graded(run: Run) -> None:
    lost, kept = run.seal(0, "lost\n"), run.seal(1)
    ref = json.loads(run.blobs.get_named(seal_name(lost)))["exit"]["workspace_ref"]
    digest = ref.removeprefix("sha256:")
    Path(run.settings.blobs, "sha256", digest[:2], digest).unlink()
    run.evaluator(MENDED)
    done = run.gyre("regrade", "r1", "--json")
    assert done.returncode == 2
    assert lost in done.stderr and ref in done.stderr and done.stderr.count("\n") == 1
    assert [verdict["episode"] for verdict in json.loads(done.stdout)] == [kept]
    assert not run.shown()[lost]["verdicts"]


async def test_what_is_selected_is_what_is_graded(run: Run) -> None:
    run.evaluator(MENDED)
    run.seal(0)
    other = run.seal(1, step=2, records="r1/000002/000/01~2")
    run.seal(2, step=2, outcome="completed", reward=0.0)
    nothing = run.seal(3, None, step=2, outcome="infra_failed")

    async def graded(**selection: Any) -> list[str]:
        return [verdict.episode[-2:] for verdict in await regrade(run.settings, "r1", **selection)]

    assert await graded() == ["00", "01", "02"], "an episode that left no workspace is passed over"
    assert await graded(step=2) == ["01", "02"]
    assert await graded(step=2, outcome="evaluator_failed") == ["01"]
    assert await graded(episode=other) == ["01"], "whatever generation of it ended"
    assert len(run.shown()[other]["verdicts"]) == 4
    for selection, said in (
        ({"episode": nothing}, "left no workspace"),
        ({"outcome": "timed_out"}, "no episode is selected"),
        ({"outcome": "broken"}, "there is no outcome 'broken'"),
        ({"step": 7}, "no sealed episodes"),
    ):
        with pytest.raises(UsageError, match=said):
            await regrade(run.settings, "r1", **selection)


async def test_a_task_set_that_has_changed_is_noticed(run: Run) -> None:
    before = evaluator_of(load_task(run.tasks / "0-fox"))
    run.seal(0, evaluator=before)
    (run.tasks / "0-fox").rename(run.tasks / "2-fox")
    with pytest.raises(UsageError, match=r"'0-fox'.*is now '1-hen'"):
        await regrade(run.settings, "r1")
    shutil.rmtree(run.tasks)
    with pytest.raises(UsageError, match="no such folder"):
        await regrade(run.settings, "r1")
    assert not run.blobs.names("verdicts")


async def test_verdicts_that_are_given_at_once_are_all_kept(run: Run) -> None:
    run.evaluator(MENDED)
    episode = run.seal(0)
    given = await asyncio.gather(*(regrade(run.settings, "r1") for _ in range(5)))
    assert all(isinstance(verdict, LaterVerdict) for verdicts in given for verdict in verdicts)
    assert len(run.shown()[episode]["verdicts"]) == 5


async def test_the_digest_of_an_evaluator_follows_all_that_decides(run: Run) -> None:
    def digest() -> str:
        return evaluator_of(load_task(run.tasks / "0-fox"))

    tests = run.tasks / "0-fox" / "tests"
    seen = [digest()]
    assert digest() == seen[0]
    for change in (
        lambda: (tests / "data.txt").write_text("x"),
        lambda: (tests / "data.txt").rename(tests / "other.txt"),
        lambda: (tests / "other.txt").chmod(0o755),
        lambda: (run.tasks / "0-fox" / "task.toml").write_text(TASK_TOML.replace("20.0", "21.0")),
    ):
        change()
        seen.append(digest())
    assert len(set(seen)) == 5
