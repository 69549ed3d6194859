"""Verifiers that work, and every way in which they don't: a reward, or EvaluatorFailed, never a zero."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.episodes.grading import EvaluatorFailed, Graded, grade
from infra.sandbox.bubblewrap import Bubblewrap
from infra.tasks.harbor import Task

pytestmark = pytest.mark.stack

REWARD = "/logs/verifier/reward.txt"
RESULT = "/logs/verifier/reward.json"


class Grader:
    def __init__(self, folder: Path, make_task: Callable[..., Task], sandbox: Bubblewrap) -> None:
        self.logs, self.workspace = folder / "logs", folder / "workspace"
        self.workspace.mkdir()
        (self.workspace / "out.txt").write_text("fox\n")
        self._make_task, self.sandbox = make_task, sandbox

    async def __call__(self, test: str, timeout_s: float = 20) -> Graded:
        return await grade(self._make_task(test), self.workspace, self.logs, timeout_s, self.sandbox)


@pytest.fixture
def graded(folder: Path, make_task: Callable[..., Task], sandbox: Bubblewrap) -> Grader:
    return Grader(folder, make_task, sandbox)


async def test_the_reward_is_the_fraction_that_the_verifier_writes(graded: Grader) -> None:
    verdict = await graded(f'test "$(cat out.txt)" = fox && echo 0.375 > {REWARD}; ls /tests; exit 1')
    assert (verdict.reward, verdict.source) == (0.375, "reward.txt")
    assert verdict.seconds > 0
    assert (graded.logs / "verifier.log").read_text() == "test.sh\n"


async def test_the_verifier_has_no_way_out_and_works_on_a_copy(graded: Grader) -> None:
    await graded(f"rm out.txt; echo spoilt > other; ls -d /run/gyre; tail -n +3 /proc/net/dev; echo 1 > {REWARD}")
    log = (graded.logs / "verifier.log").read_text()
    assert [line.split(":")[0].strip() for line in log.splitlines()] == ["ls", "lo"]
    assert os.listdir(graded.workspace) == ["out.txt"]
    assert not (graded.logs / "workspace").exists()
    assert (await graded(f"test -e out.txt && echo 1 > {REWARD}")).reward == 1, "it can be graded again"


@pytest.mark.parametrize(
    ("written", "reward"),
    [('{"reward": 0.25, "speed": 30}', 0.25), ('{"a": 1, "b": 0, "c": 0.5}', 0.5), ('{"a": 1}', 1.0)],
)
async def test_a_json_reward_is_its_reward_or_its_mean(graded: Grader, written: str, reward: float) -> None:
    verdict = await graded(f"echo '{written}' > {RESULT}")
    assert (verdict.reward, verdict.source) == (reward, "reward.json")
    assert verdict.details


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("echo broken >&2; exit 3", "exit code 3 and wrote no reward.*broken"),
        ("exit 0", "exit code 0 and wrote no reward"),
        ("kill -9 $$", "exit code 137 and wrote no reward"),
        (f"echo pass > {REWARD}", "'pass.*not one number"),
        (f": > {REWARD}", "not one number"),
        (f"echo 0.5 0.5 > {REWARD}", "not one number"),
        (f"echo nan > {REWARD}", "not in"),
        (f"echo 1.5 > {REWARD}", r"1.5 is not in \[0, 1\]"),
        (f"echo -0.1 > {REWARD}", "not in"),
        (f"echo '{{\"a\": 2}}' > {RESULT}", "not in"),
        (f"echo '{{\"a\": true}}' > {RESULT}", "'a' is True, not a number"),
        (f"echo '{{\"a\": NaN}}' > {RESULT}", "not a number"),
        (f"echo '{{\"a\": {{}}}}' > {RESULT}", "not a number"),
        (f"echo '{{}}' > {RESULT}", "write an object"),
        (f"printf '[%.0s' $(seq 30000) > {RESULT}", "reward.json"),
        (f"printf '{{\"a\": 1%0400d}}' 0 > {RESULT}", "reward.json"),
        (f"ln -s /etc/hostname {REWARD}", "cannot be read"),
        (f"mkdir {REWARD}", "not a file"),
        (f"mkfifo {REWARD}", "not a file"),
        (f"head -c 100000 /dev/zero > {REWARD}", "larger than"),
    ],
)
async def test_a_broken_verifier_is_never_a_zero(graded: Grader, test: str, said: str) -> None:
    with pytest.raises(EvaluatorFailed, match=f"(?s){said}"):
        await graded(test)


async def test_a_verifier_that_does_not_end_is_killed_with_all_it_started(graded: Grader) -> None:
    with pytest.raises(EvaluatorFailed, match=r"did not end within 0\.5 s.*waiting"):
        await graded("echo waiting; sleep 60 & sleep 60", timeout_s=0.5)
    assert graded.sandbox.remains(graded.logs / "workspace") == []


async def test_a_stale_reward_of_an_earlier_grading_does_not_count(graded: Grader) -> None:
    await graded(f"echo 1 > {REWARD}")
    with pytest.raises(EvaluatorFailed, match="wrote no reward"):
        await graded("true")


async def test_whatever_an_agent_leaves_can_be_copied_and_removed(graded: Grader) -> None:
    os.mkfifo(graded.workspace / "pipe")
    os.symlink("/etc/passwd", graded.workspace / "link")
    (graded.workspace / "closed").mkdir(mode=0)
    deep = graded.workspace
    for _ in range(120):
        deep /= "a-folder-with-a-name"
    os.makedirs(deep)
    assert (await graded(f"test -p pipe && test -L link && echo 1 > {REWARD}")).reward == 1
    assert not (graded.logs / "workspace").exists()


async def test_a_lost_workspace_is_a_failure_of_the_evaluation(graded: Grader) -> None:
    (graded.workspace / "out.txt").unlink()
    graded.workspace.rmdir()
    with pytest.raises(EvaluatorFailed, match="cannot be copied"):
        await graded(f"echo 1 > {REWARD}")
