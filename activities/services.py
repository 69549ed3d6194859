"""What activities stand on: clients that a worker opens once and hands to every activity object."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from redis.asyncio import Redis
from temporalio.client import Client

from infra.settings import Settings
from infra.state.blobs import BlobStore


@dataclass(frozen=True)
class Services:
    settings: Settings
    temporal: Client
    redis: Redis

    @cached_property
    def blobs(self) -> BlobStore:
        return BlobStore(self.settings.blobs)
