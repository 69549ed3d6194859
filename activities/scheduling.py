"""Control activities: the counts that the scheduler follows, and what workflows ask about each other."""

from __future__ import annotations

import asyncio

from temporalio import activity
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.beating import beating
from activities.forecasting import Forecasts
from activities.services import Services
from infra.state import demand, durations
from workflows import names
from workflows.contracts.results import StepInput
from workflows.scheduling.policies import FORECASTS_UNUSED, decide
from workflows.scheduling.pool_view import Decision, PoolView

POLL_S = 0.1


class SchedulingActivities:
    def __init__(self, services: Services) -> None:
        self._redis = services.redis
        self._temporal = services.temporal
        self._forecasts = Forecasts(services.redis)

    @activity.defn(name="open_step")
    async def open_step(self, step: StepInput) -> list[int]:
        """The order in which the step's groups start."""
        config = step.config
        tasks = [f"{config.tasks.train}#{task}" for task in step.tasks] if step.train else []
        limit_s = min(config.budget.active_s, config.budget.wall_s)
        plan = durations.StepPlan(tasks=tasks, group_size=step.group_size, limit_s=limit_s)
        await durations.plan_step(self._redis, step.run, step.step, plan)
        await demand.open_step(self._redis, step.run, step.step, len(step.tasks) * step.group_size)
        if not step.train or config.scheduler.policy in FORECASTS_UNUSED:
            return list(range(len(step.tasks)))
        return await self._forecasts.start_order(step.run, step.step, tasks)

    @activity.defn(name="close_step")
    async def close_step(self, run: str, step: int) -> None:
        await demand.close_step(self._redis, run, step)

    @activity.defn(name="await_turn")
    async def await_turn(self, run: str, step: int) -> None:
        """Return when every episode of the steps before has started: a later step's episodes are filler."""
        async with beating():
            while await demand.older_queued(self._redis, run, step):
                await asyncio.sleep(POLL_S)

    @activity.defn(name="watch_demand")
    async def watch_demand(self, view: PoolView) -> Decision:
        """Follow the counts until the policy decides something else than what ``view`` holds already."""
        async with beating():
            while True:
                decision = decide(await self._with_counts(view))
                if _differs(view, decision):
                    return decision
                await asyncio.sleep(POLL_S)

    @activity.defn(name="describe_steps")
    async def describe_steps(self, run: str, steps: list[int]) -> dict[str, str]:
        """Status name of each step's workflow; MISSING when there is none."""
        return {str(step): await self._status(names.step_id(run, step)) for step in steps}

    @activity.defn(name="run_status")
    async def run_status(self, run: str) -> str:
        return await self._status(names.run_id(run))

    async def _status(self, workflow_id: str) -> str:
        try:
            description = await self._temporal.get_workflow_handle(workflow_id).describe()
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            return "MISSING"
        return (description.status or WorkflowExecutionStatus.RUNNING).name

    async def _with_counts(self, view: PoolView) -> PoolView:
        steps = []
        for step in view.steps:
            counts = await demand.demand_of(self._redis, view.run, step.step)
            # Counts that Redis has not got yet (the step is just opening) must not read as "nothing to do".
            unfinished = counts.unfinished if counts.total else step.total
            steps.append(step.model_copy(update={"unfinished": unfinished}))
        counted = view.model_copy(update={"steps": steps})
        return counted if view.scheduler.policy in FORECASTS_UNUSED else await self._forecasts.with_outlooks(counted)


def _differs(view: PoolView, decision: Decision) -> bool:
    for cell in view.cells:
        assigned = decision.assignments[cell.cell]
        if (cell.training_step, cell.core) != (assigned.step, assigned.core):
            return True
    return False
