"""Names that a configuration chooses from: gyre's own are all implemented, and installed packages may add some."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from small_packages import packages_read_anew, put_package
from trajectory_reference import random_script

from activities.plugins import check_plugins
from trajectory import config
from trajectory.advantage import ADVANTAGES
from trajectory.config import LOSS_NAMES, LossConfig, TrajectoryConfig
from trajectory.episode import GradedEpisode
from trajectory.loss import LOSSES, loss_named, policy_loss
from trajectory.plugins import Choices, PluginError
from trajectory.process import process_group
from trajectory.reduction import REDUCTIONS
from trajectory.selection import DRAWS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where installed packages are found."""
    monkeypatch.syspath_prepend(tmp_path)
    with packages_read_anew():
        yield tmp_path


@pytest.mark.parametrize(
    ("names", "implemented"),
    [
        (config.ADVANTAGE_NAMES, ADVANTAGES),
        (config.REDUCTION_NAMES, REDUCTIONS),
        (config.DRAW_NAMES, DRAWS),
        (LOSS_NAMES, LOSSES),
    ],
)
def test_every_name_that_a_configuration_may_use_is_implemented(names: Choices, implemented: dict[str, object]) -> None:
    assert names.built_in == tuple(implemented)


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValidationError, match="'ppo' is none of gspo, gspo_token, grpo, cispo"):
        LossConfig(loss="ppo")
    with pytest.raises(ValidationError, match="loss\n  Input should be a valid string"):
        LossConfig.model_validate({"loss": ["gspo"]})


MEAN_RATIO = """
from trajectory.loss import Loss, Objective

def objective(t):
    ratio = t.means(t.current - t.old).exp()
    return Objective(False, t.clipped(ratio, t.advantage), ratio, t.means(t.mismatch))

mean_ratio = Loss(objective, 0.01, 0.02)
nothing = 3
"""


def test_the_loss_of_an_installed_package_is_trained_with_its_own_clips(folder: Path) -> None:
    put_package(folder, "mean_ratio_loss", "gyre.losses", MEAN_RATIO, mean_ratio="mean_ratio")
    chosen = LossConfig(loss="mean_ratio")
    assert (chosen.epsilon_low, chosen.epsilon_high) == (None, None)
    assert LossConfig.model_validate_json(chosen.model_dump_json()) == chosen
    scripts = [random_script(random.Random(i), f"e/{i}", 8) for i in range(4)]
    group = [GradedEpisode(s.episode, s.records, float(i % 2)) for i, s in enumerate(scripts)]
    micro_step = process_group(group, TrajectoryConfig()).micro_steps[0]
    logp = torch.full((micro_step.tokens,), -1.0, dtype=torch.float64)
    theirs, stats = policy_loss(logp, micro_step, chosen)
    own, expected = policy_loss(logp, micro_step, LossConfig(loss="gspo", epsilon_low=0.01, epsilon_high=0.02))
    assert (theirs.item(), stats) == (own.item(), expected)
    with pytest.raises(ValidationError, match="mean_ratio needs epsilon_low and epsilon_high"):
        LossConfig(loss="mean_ratio", old="behaviour", mismatch_p99=0.0)


def test_an_entry_point_that_is_no_loss_or_does_not_import_is_named(folder: Path) -> None:
    put_package(folder, "wrong_loss", "gyre.losses", MEAN_RATIO, number="nothing", absent="absent")
    with pytest.raises(PluginError, match=r"'number' of gyre.losses in package wrong_loss: it is a int"):
        loss_named("number")
    with pytest.raises(PluginError, match=r"'absent' .* wrong_loss:absent is not loaded: AttributeError"):
        loss_named("absent")


def test_a_name_that_is_taken_is_an_error_and_not_replaced(folder: Path) -> None:
    put_package(folder, "first_loss", "gyre.losses", MEAN_RATIO, mine="mean_ratio")
    put_package(folder, "second_loss", "gyre.losses", MEAN_RATIO, mine="mean_ratio")
    with pytest.raises(ValidationError, match=r"'mine' of gyre.losses in package .*taken by package"):
        LossConfig(loss="mine")
    put_package(folder, "third_loss", "another.group", MEAN_RATIO, gspo="mean_ratio")
    with pytest.raises(PluginError, match=r"'gspo' of another.group in package third_loss: the name is taken by gyre"):
        Choices(["gspo"], "another.group").check("mine")


def test_a_worker_and_a_submitted_run_are_told_of_a_policy_that_cannot_be_called(folder: Path) -> None:
    check_plugins()
    put_package(folder, "no_policy", "gyre.scheduling_policies", "mine = 3", mine="mine")
    with packages_read_anew(), pytest.raises(PluginError, match=r"'mine' of gyre.scheduling_policies .* it is a int"):
        check_plugins()
