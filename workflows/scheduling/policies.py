"""Scheduling policies: which cells serve rollout and which train, as pure functions of what waits.

A policy sees counts, never a clock or a server, and always gives every cell a role. The same functions run in
`watch_demand` (against the counts in Redis) and in tests.

Invariants of every policy: no unfinished episode is left without a serving cell; a cell that trains a step stays
with it until the step is closed (its gradient sum is there); a step without unfinished episodes always has a core.

To add a policy: a function from a `PoolView` to a `Decision`, its name in ``POLICIES`` here and in
`workflows/contracts/configuration.py`; a package adds one as entry point of ``gyre.scheduling_policies``.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final, cast

from workflows.contracts.configuration import POLICY_NAMES
from workflows.scheduling.pool_view import (
    Assignment,
    Decision,
    Policy,
    PoolView,
    already_training,
    assign,
    oldest_training,
    serving_need,
)
from workflows.scheduling.predictive import predictive


def watermark(view: PoolView) -> Decision:
    """The paper's rule: a cell leaves rollout once the others can hold what is unfinished of the oldest step.

    The core goes first, as soon as it fits. A further cell follows only when the training work that waits is worth
    a role switch (``satellite_s``). Episodes of later steps are filler: they never keep a cell in rollout, but while
    there is filler and nothing to train, no cell leaves.
    """
    step = oldest_training(view)
    if step is None:
        return assign(view, None, 0, "no training step is open: all cells serve")
    need = serving_need(view, step)
    spare = need.spare
    filler = any(other.unfinished for other in view.steps if other.step > step.step)
    if step.unfinished == 0 and not need.evaluated:
        spare = max(spare, 1)
    wanted = 0
    if step.unfinished == 0 or step.ready or (step.unfinished < step.total and not filler):
        seconds = step.ready_tokens / view.tokens_per_s
        worth = seconds / view.scheduler.satellite_s if view.scheduler.satellite_s else math.inf
        wanted = 1 + int(min(worth, max(0, step.ready - 1)))
    trainers = max(min(spare, wanted), already_training(view, step))
    return assign(view, step, trainers, f"{need.text}; {trainers} train")


def colocate(view: PoolView) -> Decision:
    """Baseline: all cells serve until the step has no unfinished episode, then all train."""
    step = oldest_training(view)
    if step is None or step.unfinished or any(other.unfinished for other in view.steps if not other.train):
        return assign(view, None, 0, "colocate: episodes are unfinished, all cells serve")
    return assign(view, step, len(view.cells), f"colocate: all cells train step {step.step}")


def async_split(view: PoolView) -> Decision:
    """Baseline: a static split; ``training_cells`` cells only ever train, the others only ever serve.

    One cell cannot be split: it is colocated.
    """
    if len(view.cells) == 1:
        return colocate(view)
    step = oldest_training(view)
    trainers = min(view.scheduler.training_cells, len(view.cells) - 1)
    if step is None:
        # The split stays as it is between steps: a cell that is for training is given no other work.
        assignments = {cell.cell: Assignment(step=cell.training_step, core=cell.core) for cell in view.cells}
        return Decision(assignments=assignments, reason="async: static split, no training step is open")
    return assign(view, step, trainers, f"async: static split, {trainers} cells train step {step.step}")


POLICIES: Final[dict[str, Policy]] = {
    "watermark": watermark,
    "colocate": colocate,
    "async": async_split,
    "predictive": predictive,
}
"""gyre's own, by name."""
FORECASTS_UNUSED: Final = frozenset({"watermark", "colocate", "async"})
"""Policies that look at no outlook: for them none is made."""


@cache
def policy_named(name: str) -> Policy:
    """One of gyre's own, or an installed package's. Raises PluginError when that can't be called."""
    if name in POLICIES:
        return POLICIES[name]
    policy = POLICY_NAMES.load(name)
    if not callable(policy):
        raise POLICY_NAMES.unusable(name, f"it is a {type(policy).__name__}, not a function of a PoolView")
    return cast(Policy, policy)


def decide(view: PoolView) -> Decision:
    """The decision of the policy that ``view.scheduler`` names."""
    return policy_named(view.scheduler.policy)(view)
