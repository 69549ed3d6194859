"""`gyre.Group`: the G episodes of one task in one step, each run, graded, and then processed together.

Invariant: every episode gets exactly one outcome. A fault of the evaluator excludes the episode, a fault of the
infrastructure excludes it; neither becomes a reward.
"""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows import activity_calls, names
    from workflows.contracts.configuration import EpisodeConfig, shared
    from workflows.contracts.results import (
        EpisodeExit,
        EpisodeInput,
        EpisodeResult,
        GradeInput,
        GroupInput,
        GroupResult,
        Outcome,
        ProcessInput,
    )


def cause_of(error: ActivityError) -> str:
    """One line for people: the fault at the bottom of an activity's failure."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    kind = cause.type if isinstance(cause, ApplicationError) and cause.type else type(cause).__name__
    return f"{kind}: {cause}"[:300]


def evaluator_of(error: ActivityError) -> str:
    """Which evaluator failed, as `grade_episode` says it; empty when it didn't come to that."""
    cause = error.cause
    details = cause.details if isinstance(cause, ApplicationError) else ()
    return str(details[0]) if details else ""


def without_reward(episode: str, outcome: Outcome, detail: str) -> EpisodeResult:
    blank = EpisodeExit(outcome=outcome, calls=0, gradeable=False, active_s=0, held_s=0, wall_s=0, detail=detail)
    return EpisodeResult(episode=episode, outcome=outcome, reward=None, exit=blank, detail=detail)


@workflow.defn(name="gyre.Group")
class Group:
    @workflow.init
    def __init__(self, group: GroupInput) -> None:
        self.group = group
        self.outcomes: list[EpisodeResult] = []

    @workflow.run
    async def run(self, group: GroupInput) -> GroupResult:
        self._describe("running")
        episodes = await asyncio.gather(*(self._episode(index) for index in range(group.group_size)))
        self._describe("processing")
        result = await activity_calls.process_group(
            ProcessInput(
                run=group.config.name,
                step=group.step,
                group=group.group,
                task=f"{self._task_set()}#{group.task}",
                train=group.train,
                version=group.version,
                episodes=list(episodes),
                trajectory=group.config.trajectory,
            )
        )
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        outcomes = sorted({episode.outcome.value for episode in episodes} - {Outcome.COMPLETED.value})
        workflow.upsert_search_attributes(
            [
                names.GYRE_RUN.value_set(group.config.name),
                names.GYRE_STEP.value_set(group.step),
                names.GYRE_OUTCOME.value_set(", ".join(outcomes) or Outcome.COMPLETED.value),
                names.GYRE_REWARD.value_set(sum(rewards) / len(rewards) if rewards else 0.0),
            ]
        )
        self._describe("done")
        return result

    @workflow.query(description="Outcome of every episode that has ended")
    def episodes(self) -> list[EpisodeResult]:
        return self.outcomes

    async def _episode(self, index: int) -> EpisodeResult:
        result = await self._run_and_grade(index)
        self.outcomes.append(result)
        self._describe("running")
        return result

    async def _run_and_grade(self, index: int) -> EpisodeResult:
        group = self.group
        name = names.episode_name(group.config.name, group.step, group.group, index)
        episode = EpisodeInput(
            run=group.config.name,
            step=group.step,
            group=group.group,
            index=index,
            task_set=self._task_set(),
            task=group.task,
            min_version=group.oldest_version,
            max_version=group.version,
            **shared(group.config, EpisodeConfig),
        )
        try:
            ended = await activity_calls.run_episode(episode, f"{name} · {group.config.harness}")
        except ActivityError as error:
            if is_cancelled_exception(error):
                return without_reward(name, Outcome.CANCELLED, "cancelled")
            return without_reward(name, Outcome.INFRA_FAILED, cause_of(error))
        ungraded = EpisodeResult(episode=name, outcome=ended.outcome, reward=None, exit=ended, detail=ended.detail)
        if not ended.gradeable:
            return ungraded
        try:
            verdict = await activity_calls.grade_episode(
                GradeInput(episode=name, task_set=self._task_set(), task=group.task, workspace_ref=ended.workspace_ref)
            )
        except ActivityError as error:
            if isinstance(error.cause, CancelledError):
                return without_reward(name, Outcome.CANCELLED, "cancelled while it was graded")
            failed = {"detail": cause_of(error), "evaluator": evaluator_of(error)}
            return ungraded.model_copy(update={"outcome": Outcome.EVALUATOR_FAILED, **failed})
        return ungraded.model_copy(update={"reward": verdict.reward, "evaluator": verdict.evaluator})

    def _task_set(self) -> str:
        tasks = self.group.config.tasks
        return tasks.train if self.group.train else tasks.heldout or tasks.train

    def _describe(self, phase: str) -> None:
        rewards = [result.reward for result in self.outcomes if result.reward is not None]
        passed = sum(reward == 1 for reward in rewards)
        lines = [
            f"**{phase}** · task {self.group.task} · {len(self.outcomes)} of {self.group.group_size} episodes ended",
            f"- passed: {passed}, graded: {len(rewards)}, excluded: {len(self.outcomes) - len(rewards)}",
        ]
        lines += [f"- {r.episode}: {r.outcome.value}, {r.detail}" for r in self.outcomes if r.reward is None][:5]
        workflow.set_current_details("\n".join(lines))
