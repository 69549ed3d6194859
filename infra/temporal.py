"""The Temporal client, with gyre's data converter and clear errors."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig
from temporalio.service import RPCError

from infra.settings import Settings

ANSWER: Final = timedelta(seconds=20)
"""How long a person's question to a workflow may take: it needs a worker, which may be gone."""


class TemporalUnreachable(RuntimeError):
    """No Temporal server answers at the configured address."""


async def connect(settings: Settings, metrics: str = "") -> Client:
    """Raises TemporalUnreachable. ``metrics``: the address on which this process answers /metrics; ValueError when it
    can't."""
    runtime = None
    if metrics:
        try:
            runtime = Runtime(telemetry=TelemetryConfig(metrics=PrometheusConfig(bind_address=metrics)))
        except ValueError as error:
            raise ValueError(f"GYRE_METRICS_ADDRESS={metrics}: {error}") from error
    try:
        return await Client.connect(
            settings.temporal,
            namespace=settings.temporal_namespace,
            data_converter=pydantic_data_converter,
            runtime=runtime,
        )
    except (RPCError, RuntimeError) as error:
        raise TemporalUnreachable(
            f"no Temporal server at {settings.temporal}: start the local stack with `gyre up`, "
            f"or set GYRE_TEMPORAL_ADDRESS ({error})"
        ) from error
