"""Steps that overlap: which are open, what their episodes are sampled by, and when they are trained. Real workflows."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from scripted_cluster import ScriptedCluster
from temporalio import activity
from test_orchestration import config, pool, start

from workflows.contracts.configuration import EvaluationConfig
from workflows.contracts.orders import (
    Candidate,
    CellOrder,
    CellReport,
    DrainInput,
    DrainResult,
    FinishInput,
    TrainInput,
    TrainResult,
)
from workflows.contracts.results import EpisodeExit, EpisodeInput, GroupResult, ProcessInput

pytestmark = pytest.mark.stack


@dataclass
class ServingCluster(ScriptedCluster):
    """Like the proxy, it starts an episode only when a cell serves a version in its window, and notes which."""

    serving: dict[str, int] = field(default_factory=dict)
    sampled: defaultdict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    """(step, group) -> versions that sampled it."""
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    @activity.defn(name="drain_cell")
    async def drain_cell(self, drain: DrainInput) -> DrainResult:
        self.serving.pop(drain.cell, None)
        return await super().drain_cell(drain)

    @activity.defn(name="serve_rollout")
    async def serve_rollout(self, order: CellOrder) -> CellReport:
        async with self.moved:
            self.serving[order.cell] = order.desired.version
            self.moved.notify_all()
        return await super().serve_rollout(order)

    @activity.defn(name="run_episode")
    async def run_episode(self, episode: EpisodeInput) -> EpisodeExit:
        def fit() -> list[int]:
            return [v for v in self.serving.values() if episode.min_version <= v <= episode.max_version]

        async with asyncio.timeout(30), self.moved:
            await self.moved.wait_for(lambda: bool(fit()))
        self.sampled[episode.step, episode.group].add(min(fit()))
        return await super().run_episode(episode)

    @activity.defn(name="process_group")
    async def process_group(self, group: ProcessInput) -> GroupResult:
        result = await super().process_group(group)
        return result.model_copy(update={"oldest_version": min(self.sampled[group.step, group.group])})

    @activity.defn(name="train_micro_steps")
    async def train_micro_steps(self, order: TrainInput) -> TrainResult:
        self.log.append(("claim of", order.version))
        return await super().train_micro_steps(order)

    @activity.defn(name="finish_step")
    async def finish_step(self, order: FinishInput) -> Candidate:
        update = await super().finish_step(order)
        self.log.append(("update", update.version))
        return update


@pytest.mark.parametrize("staleness", [2, 4])
async def test_steps_overlap_and_no_token_is_staler_than_allowed(staleness: int) -> None:
    cluster = ServingCluster()
    async with pool(cluster) as client:
        run = config(steps=staleness + 3, evaluation=EvaluationConfig(every=0), max_staleness=staleness)
        await asyncio.wait_for((await start(client, run)).result(), 90)
    still_open = most = version = 0
    for kind, entry in cluster.log:
        if kind in ("open", "close"):
            still_open += 1 if kind == "open" else -1
            most = max(most, still_open)
        elif kind == "update":
            assert entry == version + 1, "trained out of order"
            version = entry
        elif kind == "claim of":
            assert entry == version, "micro-steps of a step wait for the update before it"
    assert most == staleness + 1
    results = [commit.result for commit in cluster.committed]
    assert [result.version for result in results] == list(range(1, staleness + 4))
    assert max(result.staleness for result in results) == staleness, "as stale as allowed, and no staler"
