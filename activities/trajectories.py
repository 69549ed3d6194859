"""`process_group`: from the durable call records of a group's episodes to micro-steps in the blob store.

Reads records, calls the pure trajectory processor, writes blobs. An episode whose chain of records has a gap is
excluded as `infra_failed`: a token that cannot be proven is not trained.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import orjson
from temporalio import activity

from activities.beating import beating
from activities.services import Services
from infra.state import keys
from infra.state.record_names import seal_name
from infra.state.redis import as_bytes
from trajectory.episode import GradedEpisode
from trajectory.process import process_group
from trajectory.records import MOVED, CallRecord, RecordError, decode_chain
from trajectory.seal import seal
from trajectory.tree import EpisodeTree
from workflows.contracts.results import EpisodeResult, GroupResult, MicroStepRef, Outcome, ProcessInput

KEEP_RECORDS_S = 7 * 24 * 3600
"""Seconds for which an episode stays in Redis after it was sealed to the blob store."""


@dataclass(frozen=True)
class Loaded:
    """An episode with its records as they lie in Redis."""

    result: EpisodeResult
    data: list[bytes]
    records: list[CallRecord]
    tree: EpisodeTree | None
    """Built once; None when the records are broken, and ``records`` is then empty."""

    @property
    def name(self) -> str:
        return self.result.exit.records or self.result.episode


class TrajectoryActivities:
    def __init__(self, services: Services) -> None:
        self._redis = services.redis
        self._blobs = services.blobs

    @activity.defn(name="process_group")
    async def process(self, group: ProcessInput) -> GroupResult:
        async with beating(10.0):
            loaded = [await self._load(episode) for episode in group.episodes]
            result = await asyncio.to_thread(self._process, group, loaded)
            await self._expire(group)
        return result

    def _process(self, group: ProcessInput, loaded: list[Loaded]) -> GroupResult:
        for episode in loaded:
            self._seal(episode, group)
        inputs = [GradedEpisode(e.name, e.records, e.result.reward, e.tree) for e in loaded]
        processed = process_group(inputs, group.trajectory)
        stats = processed.stats
        micro_steps = []
        for micro_step in processed.micro_steps if group.train else []:
            ref = self._blobs.put(micro_step.to_bytes())
            micro_steps.append(MicroStepRef(ref=ref, tokens=micro_step.tokens, targets=micro_step.targets))
        recomputed = processed.recomputed_tokens if group.train else 0
        if recomputed:
            activity.logger.info(
                "group %s: %d of %d tokens are computed again, a budget of %d splits what shares them",
                group.group,
                recomputed,
                stats.packed_tokens,
                group.trajectory.token_budget,
            )
        results = [episode.result for episode in loaded]
        records = [record for episode in loaded for record in episode.records]
        rewards = [result.reward for result in results if result.reward is not None]
        details = {
            "group": group.group,
            "task": group.task,
            "episodes": [result.episode for result in results],
            "stats": stats.model_dump(),
            "excluded": dict(Counter(result.outcome.value for result in results if result.reward is None)),
            "normaliser": processed.normaliser,
            "recomputed_tokens": recomputed,
        }
        return GroupResult(
            group=group.group,
            task=group.task,
            valid=len(rewards),
            passed=sum(reward == 1 for reward in rewards),
            reward_sum=sum(rewards),
            outcomes=dict(Counter(result.outcome.value for result in results)),
            reason=stats.reason if group.train else "",
            micro_steps=micro_steps,
            normaliser=processed.normaliser,
            recomputed_tokens=recomputed,
            sampled_tokens=stats.sampled_tokens,
            trained_tokens=stats.trained_tokens if group.train else 0,
            oldest_version=-1 if stats.oldest_version is None else stats.oldest_version,
            active_s=sum(result.exit.active_s for result in results),
            held_s=sum(result.exit.held_s for result in results),
            moved_calls=sum(len(record.cells) > 1 for record in records),
            **{name: sum(getattr(record, name) for record in records) for name in MOVED},
            stats_ref=self._blobs.put(orjson.dumps(details)),
        )

    async def _load(self, episode: EpisodeResult) -> Loaded:
        name = episode.exit.records or episode.episode
        data = [as_bytes(item) for item in await self._redis.lrange(keys.calls(name), 0, -1)]
        return await asyncio.to_thread(_read, episode, data)

    def _seal(self, episode: Loaded, group: ProcessInput) -> None:
        about = {
            **episode.result.model_dump(mode="json"),
            "task": group.task,
            "step": group.step,
            "version": group.version,
            "records_ref": self._blobs.put(pack_records(episode.data)),
            "tree_ref": self._blobs.put(seal(episode.tree, episode.records)) if episode.tree else "",
            "calls": len(episode.data),
        }
        self._blobs.put_named(seal_name(episode.name), orjson.dumps(about, option=orjson.OPT_INDENT_2))

    async def _expire(self, group: ProcessInput) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for episode in group.episodes:
                for of in {episode.episode, episode.exit.records or episode.episode}:
                    for name in keys.of_episode(of):
                        pipe.expire(name, KEEP_RECORDS_S)
            await pipe.execute()


def _read(episode: EpisodeResult, data: list[bytes]) -> Loaded:
    """An episode with a gap in its chain, or with records that can't be, is excluded."""
    try:
        records = decode_chain(data)
        return Loaded(episode, data, records, EpisodeTree.from_records(records))
    except RecordError as error:
        broken = {"outcome": Outcome.INFRA_FAILED, "reward": None, "detail": f"call records: {error}"}
        return Loaded(episode.model_copy(update=broken), data, [], None)


def pack_records(data: list[bytes]) -> bytes:
    """Encoded records as one blob, each with its length before it (8 bytes, little-endian)."""
    return b"".join(len(item).to_bytes(8, "little") + item for item in data)


def unpack_records(blob: bytes) -> list[bytes]:
    """The inverse of ``pack_records``."""
    items, position = [], 0
    while position < len(blob):
        length = int.from_bytes(blob[position : position + 8], "little")
        items.append(blob[position + 8 : position + 8 + length])
        position += 8 + length
    return items
