"""Control activities: the counts that the scheduler follows, and what workflows ask about each other."""

from __future__ import annotations

import asyncio

from temporalio import activity
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.beating import beating
from activities.services import Services
from infra import demand
from workflows import names
from workflows.contracts import StepInput
from workflows.policies import Decision, PoolView, decide

POLL_S = 0.1


class SchedulingActivities:
    def __init__(self, services: Services) -> None:
        self._redis = services.redis
        self._temporal = services.temporal

    @activity.defn(name="open_step")
    async def open_step(self, step: StepInput) -> None:
        await demand.open_step(self._redis, step.run, step.step, len(step.tasks) * step.group_size)

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
        found: dict[str, str] = {}
        for step in steps:
            try:
                description = await self._temporal.get_workflow_handle(names.step_id(run, step)).describe()
            except RPCError as error:
                if error.status is not RPCStatusCode.NOT_FOUND:
                    raise
                found[str(step)] = "MISSING"
                continue
            found[str(step)] = (description.status or WorkflowExecutionStatus.RUNNING).name
        return found

    async def _with_counts(self, view: PoolView) -> PoolView:
        steps = []
        for step in view.steps:
            counted = await demand.demand_of(self._redis, view.run, step.step)
            # Counts that Redis has not got yet (the step is just opening) must not read as "nothing to do".
            unfinished = counted.unfinished if counted.total else step.total
            steps.append(step.model_copy(update={"unfinished": unfinished}))
        return view.model_copy(update={"steps": steps})


def _differs(view: PoolView, decision: Decision) -> bool:
    for cell in view.cells:
        assigned = decision.assignments[cell.cell]
        if (cell.training_step, cell.core) != (assigned.step, assigned.core):
            return True
    return False
