"""`process_group` with a real Valkey and blob store: seals, micro-steps, and what the step divides by."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import cast

import numpy as np
import orjson
import pytest
from redis.asyncio import Redis
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment
from trajectory_reference import random_script

from activities.services import Services
from activities.trajectories import TrajectoryActivities, unpack_records
from infra.settings import Settings
from infra.state import keys
from infra.state.record_names import seal_name
from trajectory import tree as tree_module
from trajectory.config import TrajectoryConfig
from trajectory.micro_step import MicroStep
from trajectory.records import CallRecord, decode_chain, encode
from trajectory.seal import unseal
from trajectory.tree import EpisodeTree
from trajectory.verify import verify_provenance
from workflows.contracts.results import EpisodeExit, EpisodeResult, GroupResult, Outcome, ProcessInput

NAMES = [f"r1/000000/000/{i:02d}" for i in range(4)]


def _result(name: str, reward: float | None) -> EpisodeResult:
    ended = EpisodeExit(outcome=Outcome.COMPLETED, calls=8, gradeable=True, active_s=1, held_s=0, wall_s=1)
    return EpisodeResult(episode=name, outcome=Outcome.COMPLETED, reward=reward, exit=ended)


async def _process(
    redis: Redis, folder: Path, episodes: dict[str, list[CallRecord]], *, lost: str, **choices: object
) -> tuple[GroupResult, TrajectoryActivities, Services]:
    for name, records in episodes.items():
        data = [encode(record) for record in records]
        await redis.rpush(keys.calls(name), *(data[1:] if name == lost else data))
    settings = Settings(home=folder)
    services = Services(settings, cast(Client, None), redis)
    activities = TrajectoryActivities(services)
    group = ProcessInput(
        run="r1",
        step=0,
        group=0,
        task="t",
        train=True,
        version=0,
        episodes=[_result(name, float(i % 2)) for i, name in enumerate(episodes)],
        trajectory=TrajectoryConfig.model_validate({"token_budget": 60, **choices}),
    )
    return await ActivityEnvironment().run(activities.process, group), activities, services


@pytest.fixture
def episodes() -> dict[str, list[CallRecord]]:
    return {name: random_script(random.Random(20 + i), name, 8).records for i, name in enumerate(NAMES)}


async def test_a_group_is_sealed_and_its_micro_steps_come_from_its_records_with_each_tree_built_once(
    redis: Redis, tmp_path: Path, episodes: dict[str, list[CallRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    original = tree_module._Builder.build

    def counted(builder: tree_module._Builder, episode: str) -> EpisodeTree:
        built.append(episode)
        return original(builder, episode)

    monkeypatch.setattr(tree_module._Builder, "build", counted)
    result, _, services = await _process(redis, tmp_path, episodes, lost="")
    assert sorted(built) == NAMES
    monkeypatch.undo()
    micro_steps = [MicroStep.from_bytes(services.blobs.get(ref.ref)) for ref in result.micro_steps]
    assert verify_provenance(micro_steps, episodes).targets == result.trained_tokens > 0
    assert any((m.prefix_of >= 0).any() for m in micro_steps)
    assert (result.valid, result.normaliser, result.in_normaliser) == (4, 4, 4)
    for name, records in episodes.items():
        about = orjson.loads(services.blobs.get_named(seal_name(name)))
        assert decode_chain(unpack_records(services.blobs.get(about["records_ref"]))) == records
        sealed, expected = unseal(services.blobs.get(about["tree_ref"])).tree, EpisodeTree.from_records(records)
        for field in dataclasses.fields(EpisodeTree):
            assert np.array_equal(getattr(sealed, field.name), getattr(expected, field.name))


async def test_a_lost_record_excludes_its_episode_and_tokens_are_counted_for_a_mean_over_tokens(
    redis: Redis, tmp_path: Path, episodes: dict[str, list[CallRecord]]
) -> None:
    result, _, services = await _process(redis, tmp_path, episodes, lost=NAMES[3], reduction="tokens", cap="none")
    assert (result.valid, result.outcomes) == (3, {"completed": 3, "infra_failed": 1})
    assert result.normaliser == result.in_normaliser == result.trained_tokens
    about = orjson.loads(services.blobs.get_named(seal_name(NAMES[3])))
    assert about["tree_ref"] == ""
    micro_steps = [MicroStep.from_bytes(services.blobs.get(ref.ref)) for ref in result.micro_steps]
    assert all(NAMES[3] not in m.episodes for m in micro_steps)
    assert sum(float(m.weight.sum()) for m in micro_steps) == result.trained_tokens


def test_a_recorded_result_without_a_normaliser_counts_its_valid_episodes() -> None:
    old = GroupResult(group=0, task="t", valid=3, passed=1, reward_sum=1.0, outcomes={})
    assert old.in_normaliser == 3
