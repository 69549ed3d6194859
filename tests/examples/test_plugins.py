"""Parts of one's own are found without a fork: `examples/plugin` is installed and used, and what is wrong is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from infra.harness.harness import HarnessUnavailable
from infra.harness.registry import HARNESSES, harness_named, known
from infra.quickstart.tasks import write_task_set
from trajectory.plugins import Choices

ROOT = Path(__file__).parents[2]
GYRE = str(Path(sys.executable).parent / "gyre")


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the example is installed, as anybody would do it."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(ROOT / "examples" / "plugin", folder / "source")
    pip = [sys.executable, "-m", "pip"] if find_spec("pip") else [str(shutil.which("uv")), "pip"]
    line = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target"]
    subprocess.run([*line, str(folder / "installed"), str(source)], check=True, timeout=300)
    return folder / "installed"


def run(line: list[str], *folders: Path) -> subprocess.CompletedProcess[str]:
    """A process that finds what is installed in the folders."""
    paths = os.pathsep.join([*map(str, folders), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)


def answer(code: str, *folders: Path) -> Any:
    """What a Python process prints, as JSON."""
    done = run([sys.executable, "-c", dedent(code)], *folders)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_harness_is_listed_with_the_package_that_brings_it(package: Path) -> None:
    rows = json.loads(run([GYRE, "harness", "list", "--json"], package).stdout)
    assert {row["name"]: row["package"] for row in rows if row["package"]} == {"one-shot": "gyre-example 0.1.0"}
    assert "one-shot 0.1.0 (gyre-example 0.1.0) ready" in run([GYRE, "harness", "list"], package).stdout
    assert "one-shot" not in run([GYRE, "harness", "list"]).stdout


CHECK = """
import json
from pathlib import Path
from activities.runs import ConfigurationError, check_config
from infra.settings import Settings
from workers.configuration import read_config
from workers.errors import UsageError
try:
    print(json.dumps(check_config(read_config(Path({config!r})), Settings())))
except (ConfigurationError, UsageError) as error:
    print(json.dumps(str(error)))
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run that names all three, with a policy and a task that are there."""
    write_task_set(tmp_path, seed=0, count=1)
    policy = tmp_path / "policy"
    policy.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (policy / name).touch()
    file = tmp_path / "run.toml"
    file.write_text(
        'name = "own"\npolicy = "policy"\nharness = "one-shot"\nsteps = 1\ntasks_per_step = 1\n'
        '[tasks]\ntrain = "tasks"\n[loss]\nloss = "unclipped"\n[scheduler]\npolicy = "core-only"\n'
    )
    return file


def test_a_run_that_names_all_three_passes_what_submit_checks(package: Path, config: Path) -> None:
    assert answer(CHECK.format(config=str(config)), package) == [1, 0]


@pytest.mark.parametrize("part", ["one-shot", "unclipped", "core-only"])
def test_without_the_package_each_name_is_refused(config: Path, part: str) -> None:
    others = {"one-shot": "mini", "unclipped": "gspo", "core-only": "watermark"}
    for name in others.keys() - {part}:
        config.write_text(config.read_text().replace(f'"{name}"', f'"{others[name]}"'))
    said = answer(CHECK.format(config=str(config)))
    assert part in said and others[part] in said, said


def test_the_loss_is_computed_by_its_formula(package: Path) -> None:
    value, expected, gradient = answer(
        """
        import json, numpy as np, torch
        from trajectory.config import LossConfig
        from trajectory.loss import policy_loss
        from trajectory.micro_step import MicroStep

        lengths, advantage, weight = (2, 3), torch.tensor([1.0, -0.5]), torch.tensor([0.4, 0.6])
        target = np.array([False, True, True, False, True, True, True])  # behind a token of prompt each
        behaviour = torch.tensor([-1.0, -2.0, -0.5, -0.1, -3.0])
        logp = torch.tensor([0, -1.5, -1.0, 0, -0.5, -0.4, -2.0], dtype=torch.float64, requires_grad=True)
        per_token = np.zeros(7, np.int32)
        micro_step = MicroStep(
            ids=per_token, version=per_token, call=per_token, offset=per_token, target=target,
            behaviour=np.zeros(7, np.float32), temperature=np.ones(7, np.float32),
            cu_seqlens=np.array([0, 3, 7], np.int32), prefix_of=np.full(2, -1, np.int32),
            prefix_len=np.zeros(2, np.int32), advantage=advantage.double().numpy(), weight=weight.double().numpy(),
            episode_index=np.arange(2, dtype=np.int32), episodes=("a", "b"), kinds=("main", "main"),
        )
        micro_step.behaviour[target] = behaviour
        config = LossConfig(loss="unclipped", old="behaviour", epsilon_low=0.2, epsilon_high=0.2, mismatch_p99=1e-4)
        loss, _ = policy_loss(logp, micro_step, config)
        loss.backward()
        means = torch.stack([part.mean() for part in (logp[target] - behaviour).split(lengths)])
        print(json.dumps([loss.item(), -(weight * means.exp() * advantage).sum().item(), logp.grad.abs().sum().item()]))
        """,
        package,
    )
    assert value == pytest.approx(expected, rel=1e-6) and gradient > 0


def test_the_policy_decides(package: Path) -> None:
    trainers = answer(
        """
        import json
        from workflows.contracts.configuration import SchedulerConfig
        from workflows.scheduling.policies import decide
        from workflows.scheduling.pool_view import CellView, PoolView, StepView

        def trainers(unfinished):
            view = PoolView(
                run="r", cells=[CellView(cell=f"cell-{i}") for i in range(3)], capacity=8,
                steps=[StepView(step=0, train=True, unfinished=unfinished, total=32, ready=4)],
                scheduler=SchedulerConfig(policy="core-only"),
            )
            return [cell for cell, given in decide(view).assignments.items() if given.step == 0 and given.core]

        print(json.dumps([trainers(17), trainers(16), trainers(0)]))
        """,
        package,
    )
    assert trainers == [[], ["cell-0"], ["cell-0"]]


# --- what is wrong is named ---------------------------------------------------------------------------------------

HARNESS = "from infra.harness.mini_adapter import Mini\nclass Own(Mini):\n    name = 'own'\n"
TAKES_A_FOLDER = "    def __init__(self, folder): super().__init__()\n"


def brought(folder: Path, name: str, code: str = HARNESS + TAKES_A_FOLDER, distribution: str = "theirs") -> None:
    """A package in the folder that brings a harness ``Own`` under the name."""
    information = folder / f"{distribution}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[gyre.harnesses]\n{name} = {distribution}_parts:Own\n")
    (folder / f"{distribution}_parts.py").write_text(code)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages that this process finds, for one test."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("infra.harness.registry.HARNESSES", Choices(HARNESSES.built_in, HARNESSES.group))
    yield folder
    for name in ("theirs_parts", "others_parts"):
        sys.modules.pop(name, None)


def test_a_harness_of_ones_own_is_found_beside_gyres(installed: Path) -> None:
    brought(installed, "own")
    assert known()["own"] == "theirs 1.0" and known()["mini"] == ""
    assert harness_named("own").name == "own"
    assert harness_named("mini").name == "mini"


def test_a_name_that_gyre_has_is_not_taken_over(installed: Path) -> None:
    brought(installed, "mini")
    for look in (known, lambda: harness_named("mini")):
        with pytest.raises(HarnessUnavailable, match=r"'mini'.*theirs.*taken by gyre itself"):
            look()


def test_a_name_that_two_packages_bring_is_neithers(installed: Path) -> None:
    brought(installed, "own")
    brought(installed, "own", distribution="others")
    with pytest.raises(HarnessUnavailable, match=r"'own'.*package theirs.*taken by package others"):
        harness_named("own")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import a_module_that_is_missing", "No module named 'a_module_that_is_missing'"),
        (HARNESS + TAKES_A_FOLDER + "raise OSError('no disk')", "OSError: no disk"),
        ("Own = 'a string'", "neither a class nor a function"),
        (HARNESS + "    def __init__(self): pass", "TypeError"),
        ("class Own:\n    name = 'own'\n" + TAKES_A_FOLDER, "lacks version, address_space_mb, .*, check"),
        (HARNESS.replace("'own'", "'another'") + TAKES_A_FOLDER, "calls itself 'another'"),
    ],
)
def test_what_is_no_harness_says_what_it_lacks_and_leaves_the_others_alone(
    installed: Path, code: str, says: str
) -> None:
    brought(installed, "own", code)
    with pytest.raises(HarnessUnavailable, match=f"'own' of gyre.harnesses in package theirs: .*{says}"):
        harness_named("own")
    assert harness_named("mini").name == "mini"


def test_the_commands_name_what_is_broken(package: Path, config: Path, tmp_path: Path) -> None:
    brought(tmp_path / "broken", "own", "import a_module_that_is_missing")
    rows = json.loads(run([GYRE, "harness", "list", "--json"], package, tmp_path / "broken").stdout)
    (row,) = [row for row in rows if row["name"] == "own"]
    assert row["package"] == "theirs 1.0" and "a_module_that_is_missing" in row["missing"]
    config.write_text(config.read_text().replace("one-shot", "own"))
    said = answer(CHECK.format(config=str(config)), package, tmp_path / "broken")
    assert said.startswith("harness: ") and "a_module_that_is_missing" in said
    brought(tmp_path / "clash", "codex")
    clash = run([GYRE, "harness", "list"], tmp_path / "clash")
    assert clash.returncode == 2 and "'codex'" in clash.stderr and "theirs" in clash.stderr
