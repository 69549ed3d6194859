"""A step's gauges: read from what its groups and claims have stored, added up, and shown to whoever scrapes metrics.

Invariant: a micro-step counts once, however often it was trained. A statistic that can't be read is counted as
``unread`` and never holds back the commit of what was trained.
"""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, get_args

import orjson
from temporalio import activity
from temporalio.common import MetricMeter

from infra.state.blobs import BlobMissing, BlobStore
from trajectory.advantage import Reason
from trajectory.gauges import MEANING, Gauges, Stored, added_up
from trajectory.kinds import Kind
from workflows.contracts.orders import GaugesInput
from workflows.contracts.results import Outcome, StepResult

READERS: Final = 16
"""Blobs that are read at once."""

LABELS: Final[dict[str, tuple[str, ...]]] = {
    "kind": tuple(Kind),
    "outcome": tuple(Outcome),
    "reason": tuple(reason for reason in get_args(Reason) if reason),
    "lag": tuple(map(str, range(5))),
}
"""Every value of a label: a metric keeps its last value, so what no longer occurs has to be set to zero."""

PARTS: Final = {
    "gyre_sampled_tokens": ("kind", "sampled"),
    "gyre_trained_tokens": ("kind", "trained"),
    "gyre_left_out_tokens": ("kind", "left_out"),
    "gyre_no_gradient_tokens": ("kind", "without_gradient"),
    "gyre_trained_tokens_by_lag": ("lag", "trained_by_lag"),
    "gyre_excluded_episodes": ("outcome", "excluded"),
    "gyre_groups_without_gradient": ("reason", "groups_without_gradient"),
}
"""Metric -> its label, and the field of ``Gauges`` with a count for each value of the label."""


async def step_gauges(blobs: BlobStore, of: GaugesInput, *, train: bool) -> Gauges:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(READERS) as pool:
        read = await asyncio.gather(
            *(loop.run_in_executor(pool, _read, blobs, ref) for ref in [*of.groups, *of.claims])
        )
    count = len(of.groups)
    return await asyncio.to_thread(added_up, read[:count], read[count:], version=of.version, train=train)


def _read(blobs: BlobStore, ref: str) -> Stored:
    try:
        stored: dict[str, Any] = orjson.loads(blobs.get(ref))
    except (BlobMissing, ValueError) as error:  # ValueError: damaged
        activity.logger.warning("statistics %s cannot be read: %s", ref, error)
        return None
    return stored


def expose(meter: MetricMeter, result: StepResult, gauges: Gauges) -> None:
    """The newest step's gauges as metrics, by run; NaN where there is nothing to tell."""
    labels = {"run": result.run, "phase": "train" if result.train else "evaluate"}
    numbers = {**dict.fromkeys(MEANING, math.nan), "unread": 0.0, **result.gauges}
    numbers |= {"step": float(result.step), "reward": result.mean_reward, "pass_rate": result.pass_rate}
    for name, value in numbers.items():
        meter.create_gauge_float(f"gyre_{name}", MEANING.get(name)).set(value, labels)
    for name, (label, field) in PARTS.items():
        counts: dict[str, int] = getattr(gauges, field)
        metric = meter.create_gauge(name)
        for of in LABELS[label]:
            metric.set(counts.get(of, 0), {**labels, label: of})
