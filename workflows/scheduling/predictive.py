"""The `predictive` policy: when a further cell should leave rollout, from what it would bring and what it would cost.

It chooses among a few plans (how many cells train the oldest step, and from when) the one with the least predicted
cost, and acts on what that plan does now. The cost of a plan, in seconds of a cell, adds up

- the seconds of role switches, as they were measured;
- the seconds in which a training cell would have nothing to train while later steps' episodes could have used it;
- the time until the update, times the cells that have nothing better to do until then.

A cell that trains stays until its step is closed, so joining cannot be taken back: a plan that joins later is always
among those compared, and that makes roles stable. Without forecasts or measured switches it is the watermark rule,
with `satellite_s` as the price of a switch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from workflows.scheduling.pool_view import (
    Decision,
    Outlook,
    PoolView,
    StepView,
    already_training,
    assign,
    oldest_training,
    serving_need,
)

UPDATE_WEIGHT: Final = 0.005
"""What a second until the update costs each cell that is busy anyway: a later update is never for free."""
LATE: Final = 2.0
"""Groups may come this much later than forecast: a plan's cost is the mean over both."""
WORTH: Final = 1.02
"""A plan that switches must be better by this factor than one that doesn't: forecasts are not exact."""


class JoinPlan(NamedTuple):
    trainers: int
    joins_s: float
    """Seconds from now at which the further cells leave rollout."""


class Forecast(NamedTuple):
    update_s: float
    """Seconds until everything is trained."""
    idle_s: float
    """Seconds of training cells with nothing to train."""


def predictive(view: PoolView) -> Decision:
    step = oldest_training(view)
    if step is None:
        return assign(view, None, 0, "no training step is open: all cells serve")
    need, already = serving_need(view, step), already_training(view, step)
    if need.spare <= already:
        return assign(view, step, already, f"{need.text}; {already} train, no other can be spared")
    if not step.unfinished and not need.evaluated:
        trainers, why = _finishing(view, step, already)
    elif step.outlook is None:
        trainers, why = _by_waiting_work(view, step, need.spare)
    else:
        trainers, why = _by_forecast(view, step, step.outlook, already, need.spare)
    trainers = max(already, min(trainers, need.spare))
    return assign(view, step, trainers, f"{need.text}; {trainers} train: {why}")


def admission_order(expected_s: Sequence[float]) -> list[int]:
    """Indices of a step's groups in the order in which they start: those expected to take longest first.

    Each starts with all its episodes, so that it ends, and can be trained, as one. Groups of which as much is expected
    keep their order.
    """
    return sorted(range(len(expected_s)), key=lambda index: -expected_s[index])


def _switch_s(view: PoolView) -> float:
    """Seconds of a cell that leaving rollout and coming back cost."""
    if view.switch_out_s is None or view.switch_in_s is None:
        return view.scheduler.satellite_s
    return view.switch_out_s + view.switch_in_s


def _later_work_s(view: PoolView, step: StepView) -> float:
    """Seconds of a full cell for which later steps have episodes."""
    work = 0.0
    for other in view.steps:
        if other.train and other.step > step.step and other.unfinished:
            work += other.outlook.rollout_s if other.outlook else math.inf
    return work


def _finishing(view: PoolView, step: StepView, already: int) -> tuple[int, str]:
    """No episode is unfinished: what is left is training, the sooner done the more cells share it."""
    seconds = step.ready_tokens / view.tokens_per_s
    cells = len(view.cells)
    later = _later_work_s(view, step)
    best, best_cost = max(1, already), math.inf
    for trainers in range(max(1, already), max(1, already, min(cells, step.ready)) + 1):
        joining = trainers - already
        update_s = seconds / trainers + ((view.switch_out_s or 0.0) if joining else 0.0)
        # Cells that have no episodes to serve until the update gain by each second that it comes sooner.
        starved = max(0.0, (cells - trainers) * update_s - later)
        cost = starved + UPDATE_WEIGHT * cells * update_s + joining * _switch_s(view)
        if cost < best_cost:
            best, best_cost = trainers, cost
    return best, f"{seconds:.0f} s of training are left, a switch costs {_switch_s(view):.1f} s"


def _by_waiting_work(view: PoolView, step: StepView, spare: int) -> tuple[int, str]:
    """The watermark rule, for a step of which nothing is known but counts."""
    filler = any(other.unfinished for other in view.steps if other.step > step.step)
    if not step.ready and (filler or step.unfinished == step.total):
        return 0, "nothing waits to be trained"
    price = _switch_s(view)
    worth = step.ready_tokens / view.tokens_per_s / price if price else math.inf
    return min(spare, 1 + int(min(worth, max(0, step.ready - 1)))), "by the work that waits, nothing else is known"


def _by_forecast(view: PoolView, step: StepView, outlook: Outlook, already: int, spare: int) -> tuple[int, str]:
    later_s = _later_work_s(view, step)
    sizes = sorted({already, *(min(spare, already + more) for more in (1, 2, 4, 8)), spare})
    stay = JoinPlan(already, 0.0)
    costs: dict[JoinPlan, float] = {}
    forecasts: dict[JoinPlan, Forecast] = {}
    for trainers in sizes:
        for share in (0.0,) if trainers == already else (0.0, 0.4, 0.8):
            plan = JoinPlan(trainers, share * outlook.tail_s)
            forecasts[plan] = _forecast(view, step, outlook, already, plan)
            late = _forecast(view, step, outlook, already, plan, stretch=LATE)
            costs[plan] = (
                sum(_cost(view, forecast, trainers - already, later_s) for forecast in (forecasts[plan], late)) / 2
            )
    # Of equal plans the one that keeps cells serving wins, if there is anything else to serve.
    hold = 1 if later_s else -1
    best = min(costs, key=lambda plan: (round(costs[plan], 3), hold * plan.trainers, -hold * plan.joins_s))
    if best.joins_s or (later_s and costs[best] * WORTH > costs[stay]):
        best = stay
    update_s = forecasts[best].update_s
    why = (
        f"update expected in {update_s:.0f} s, tail in {outlook.tail_s:.0f} s, "
        f"{step.ready_tokens / view.tokens_per_s:.0f} s of training wait, a switch costs {_switch_s(view):.1f} s"
    )
    return best.trainers, why


def _forecast(
    view: PoolView, step: StepView, outlook: Outlook, already: int, plan: JoinPlan, *, stretch: float = 1.0
) -> Forecast:
    """Follow the training work: what waits and what groups will bring, against the cells of the plan."""
    cells = len(view.cells)
    slower = _slower(view, outlook, already, plan.trainers)
    now, waiting, idle = 0.0, step.ready_tokens / view.tokens_per_s, 0.0
    joined_s = plan.joins_s + (view.switch_out_s or 0.0)
    trainers = already
    events = []
    latest = outlook.latest_s or [math.inf] * len(outlook.due)
    for (due, tokens), end in zip(outlook.due, latest, strict=True):
        at = due * stretch
        if at > joined_s and slower > 1:
            at = joined_s + (at - joined_s) * slower
        at = min(at, end)
        events.append((at, tokens / view.tokens_per_s))
    if plan.trainers > already:
        events.append((joined_s, -1.0))
    events.sort()
    for at, seconds in events:
        if at > now:
            able = trainers * (at - now)
            now = at
            if able > waiting:
                idle += able - waiting
                waiting = 0.0
            else:
                waiting -= able
        if seconds < 0:
            trainers = plan.trainers
        else:
            waiting += seconds
    # The tail is over: whoever is worth a switch helps with the rest.
    # One more shortens the rest by waiting / n² at a price of a switch, which its share of the cells must be worth.
    worth = math.sqrt(waiting * cells / max(_switch_s(view), 1e-3))
    helpers = max(1, trainers, min(cells, int(worth)))
    rest = waiting / helpers + ((view.switch_out_s or 0.0) if helpers > trainers else 0.0)
    return Forecast(update_s=now + rest, idle_s=idle)


def _slower(view: PoolView, outlook: Outlook, already: int, trainers: int) -> float:
    """How much longer episodes take when ``trainers`` instead of ``already`` cells don't serve: from how many run in
    the mean over the tail, later steps' filling what is free."""
    if view.solo_speedup <= 1 or trainers == already or outlook.tail_s <= 0:
        return 1.0
    mean = outlook.rollout_s / outlook.tail_s  # in full cells
    mean += sum(other.unfinished for other in view.steps[1:]) / view.capacity

    def latency(serving: int) -> float:
        return 1 / view.solo_speedup + (1 - 1 / view.solo_speedup) * min(1.0, mean / max(1, serving))

    return latency(len(view.cells) - trainers) / latency(len(view.cells) - already)


def _cost(view: PoolView, forecast: Forecast, joining: int, later_s: float) -> float:
    cells = len(view.cells)
    # Share of the time until the update for which cells outside training have later episodes to serve.
    filled = 1.0 if math.isinf(later_s) else min(1.0, later_s / max(1e-9, cells * forecast.update_s))
    unfilled = max(UPDATE_WEIGHT, 1.0 - filled)
    return filled * forecast.idle_s + unfilled * cells * forecast.update_s + joining * _switch_s(view)
