"""A scripted cluster: the activities of every queue, answered from memory, so that workflows meet any fault on cue.

It stands for cells, harnesses and graders in tests of *orchestration* only; the real ones are tested end to end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError

from workflows.activity_calls import LOST
from workflows.contracts.configuration import RunConfig
from workflows.contracts.orders import (
    Candidate,
    CellOrder,
    CellReport,
    CommitInput,
    DrainInput,
    DrainResult,
    FinishInput,
    GradientsInput,
    GradientSum,
    ReachCellInput,
    TrainInput,
    TrainResult,
    WatchCellInput,
)
from workflows.contracts.results import (
    EpisodeExit,
    EpisodeInput,
    GradeInput,
    GroupResult,
    MicroStepRef,
    Outcome,
    ProcessInput,
    RunFacts,
    StepInput,
    Verdict,
)
from workflows.scheduling.policies import decide
from workflows.scheduling.pool_view import Decision, PoolView


@dataclass
class ScriptedCluster:
    episode_s: Callable[[EpisodeInput], float] = lambda episode: 0.02 * (1 + episode.index % 4)
    outcome: Callable[[EpisodeInput], Outcome] = lambda episode: Outcome.COMPLETED
    reward: Callable[[str], float] = lambda episode: float(int(episode[-1]) % 2)
    lose_claim: set[str] = field(default_factory=set)
    """Cells whose next claim is lost with their replica."""
    silent_after: dict[str, int] = field(default_factory=dict)
    """Cell -> claims of a step after which nothing of it answers any more."""
    silent: set[str] = field(default_factory=set)
    """Cells of which nothing answers; what they were ordered goes on when they are back."""
    claim_s: float = 0.05
    terminated: set[str] = field(default_factory=set)
    """Runs that are there no more."""
    log: list[tuple[str, Any]] = field(default_factory=list)
    incarnations: Counter[str] = field(default_factory=Counter)
    ended: Counter[tuple[str, int]] = field(default_factory=Counter)
    totals: dict[tuple[str, int], int] = field(default_factory=dict)
    sums: dict[str, list[str]] = field(default_factory=dict)
    finished: list[FinishInput] = field(default_factory=list)
    committed: list[CommitInput] = field(default_factory=list)

    def incarnation(self, cell: str) -> str:
        return f"{cell}#{self.incarnations[cell]}"

    def activities(self) -> list[Callable[..., Any]]:
        return [
            self.inspect_run,
            self.open_step,
            self.close_step,
            self.await_turn,
            self.describe_steps,
            self.run_status,
            self.run_episode,
            self.grade_episode,
            self.process_group,
            self.watch_demand,
            self.drain_cell,
            self.serve_rollout,
            self.prepare_training,
            self.watch_cell,
            self.reach_cell,
            self.train_micro_steps,
            self.offer_gradients,
            self.finish_step,
            self.commit_candidate,
        ]

    @activity.defn(name="inspect_run")
    async def inspect_run(self, config: RunConfig) -> RunFacts:
        return RunFacts(train_tasks=50, heldout_tasks=10, candidate_ref="candidate-0")

    @activity.defn(name="open_step")
    async def open_step(self, step: StepInput) -> None:
        self.totals[step.run, step.step] = len(step.tasks) * step.group_size
        self.log.append(("open", step))

    @activity.defn(name="close_step")
    async def close_step(self, run: str, step: int) -> None:
        self.log.append(("close", step))

    @activity.defn(name="await_turn")
    async def await_turn(self, run: str, step: int) -> None:
        self.log.append(("turn", step))

    @activity.defn(name="describe_steps")
    async def describe_steps(self, run: str, steps: list[int]) -> dict[str, str]:
        return {str(step): "RUNNING" for step in steps}

    @activity.defn(name="run_status")
    async def run_status(self, run: str) -> str:
        return "TERMINATED" if run in self.terminated else "RUNNING"

    @activity.defn(name="run_episode")
    async def run_episode(self, episode: EpisodeInput) -> EpisodeExit:
        await asyncio.sleep(self.episode_s(episode))
        self.ended[episode.run, episode.step] += 1
        outcome = self.outcome(episode)
        gradeable = outcome in (Outcome.COMPLETED, Outcome.TIMED_OUT, Outcome.TRUNCATED)
        return EpisodeExit(outcome=outcome, calls=1, gradeable=gradeable, active_s=1, held_s=0, wall_s=1)

    @activity.defn(name="grade_episode")
    async def grade_episode(self, grade: GradeInput) -> Verdict:
        reward = self.reward(grade.episode)
        if reward < 0:
            raise ApplicationError("no reward was written", type="EvaluatorFailed", non_retryable=True)
        return Verdict(reward=reward, seconds=0.1)

    @activity.defn(name="process_group")
    async def process_group(self, group: ProcessInput) -> GroupResult:
        rewards = [episode.reward for episode in group.episodes if episode.reward is not None]
        refs = [f"{group.run}/{group.step}/{group.group}/{i}" for i in range(2)] if group.train else []
        return GroupResult(
            group=group.group,
            task=group.task,
            valid=len(rewards),
            passed=sum(reward == 1 for reward in rewards),
            reward_sum=sum(rewards),
            outcomes=dict(Counter(episode.outcome.value for episode in group.episodes)),
            micro_steps=[MicroStepRef(ref=ref, tokens=1000, targets=10) for ref in refs],
            oldest_version=group.version,
        )

    @activity.defn(name="watch_demand")
    async def watch_demand(self, view: PoolView) -> Decision:
        while True:
            steps = [
                step.model_copy(update={"unfinished": step.total - self.ended[view.run, step.step]})
                for step in view.steps
            ]
            decision = decide(view.model_copy(update={"steps": steps}))
            for cell in view.cells:
                assigned = decision.assignments[cell.cell]
                if (assigned.step, assigned.core) != (cell.training_step, cell.core):
                    return decision
            activity.heartbeat()
            await asyncio.sleep(0.02)

    @activity.defn(name="drain_cell")
    async def drain_cell(self, drain: DrainInput) -> DrainResult:
        return DrainResult(seconds=0, acknowledged=1, expired=0)

    @activity.defn(name="serve_rollout")
    async def serve_rollout(self, order: CellOrder) -> CellReport:
        await self._answering(order.cell)
        self.log.append(("serve", (order.cell, order.desired.version, order.desired.epoch)))
        return self._report(order.cell)

    @activity.defn(name="prepare_training")
    async def prepare_training(self, order: CellOrder) -> CellReport:
        await self._answering(order.cell)
        if order.desired.fence == self.incarnation(order.cell):
            self.incarnations[order.cell] += 1
        self.log.append(("train", (order.cell, order.desired.step, order.desired.core)))
        return self._report(order.cell)

    @activity.defn(name="watch_cell")
    async def watch_cell(self, watch: WatchCellInput) -> CellReport:
        while True:
            if watch.cell in self.silent:
                return self._report(watch.cell).model_copy(update={"missing": "replica"})
            if watch.replica != self.incarnation(watch.cell):
                return self._report(watch.cell)
            activity.heartbeat()
            await asyncio.sleep(0.05)

    @activity.defn(name="reach_cell")
    async def reach_cell(self, reach: ReachCellInput) -> CellReport:
        await self._answering(reach.cell, "replica")
        return self._report(reach.cell)

    @activity.defn(name="train_micro_steps")
    async def train_micro_steps(self, order: TrainInput) -> TrainResult:
        claims = sum(kind == "claim" and entry[:2] == (order.cell, order.step) for kind, entry in self.log)
        if claims == self.silent_after.get(order.cell):
            del self.silent_after[order.cell]
            self.silent.add(order.cell)
        await self._answering(order.cell)
        await asyncio.sleep(self.claim_s)
        if order.cell in self.lose_claim:
            self.lose_claim.discard(order.cell)
            self.incarnations[order.cell] += 1
        if order.incarnation != self.incarnation(order.cell):
            raise ApplicationError("another replica is here", type=LOST, non_retryable=True)
        self.sums.setdefault(order.incarnation, []).extend(order.micro_steps)
        self.log.append(("claim", (order.cell, order.step, order.micro_steps)))
        return TrainResult(seconds=0.5, stats={"targets": 10.0, "max_token_delta": 1e-6})

    @activity.defn(name="offer_gradients")
    async def offer_gradients(self, order: GradientsInput) -> GradientSum:
        await self._answering(order.cell)
        refs = [ref for ref in self.sums.get(order.incarnation, []) if ref.startswith(f"{order.run}/{order.step}/")]
        return GradientSum(cell=order.cell, incarnation=order.incarnation, micro_steps=refs, manifest_ref="manifest")

    @activity.defn(name="finish_step")
    async def finish_step(self, order: FinishInput) -> Candidate:
        self.finished.append(order)
        mine = [ref for ref in self.sums.get(order.incarnation, []) if ref.startswith(f"{order.run}/{order.step}/")]
        theirs = [ref for offer in order.satellites for ref in offer.micro_steps]
        assert sorted(mine + theirs) == sorted(order.micro_steps), "sums must be disjoint and complete"
        version = order.version + 1
        return Candidate(ref=f"candidate-{version}", version=version, grad_norm=1.0, checksum="c")

    @activity.defn(name="commit_candidate")
    async def commit_candidate(self, commit: CommitInput) -> None:
        self.committed.append(commit)

    async def _answering(self, cell: str, *detail: str) -> None:
        while cell in self.silent:
            activity.heartbeat(*detail)
            await asyncio.sleep(0.05)

    def _report(self, cell: str) -> CellReport:
        return CellReport(engine=f"engine-{cell}", replica=self.incarnation(cell), source="resident")
