"""`gyre replay`: recompute a recorded step offline, and prove where every trained token came from.

The gradient is recomputed by one replica in this process and compared with the recorded sum; every target token of
the step's micro-steps is checked against the sealed call records.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from pydantic import BaseModel

from infra.settings import Settings
from infra.state.blobs import BlobStore
from infra.state.record_names import config_name, step_name
from trajectory.micro_step import MicroStep
from trajectory.verify import verify_provenance
from workers.errors import UsageError
from workers.records.episodes import load_episode
from workers.records.gauges import recorded
from workflows.contracts.configuration import RunConfig
from workflows.contracts.results import StepResult

TOLERANCE = 1e-5
"""Relative difference that fp32 allows between two orders of summation."""


class StepReplay(BaseModel):
    run: str
    step: int
    version: int
    difference: float
    """L2 norm of (recomputed − recorded), relative to the recorded gradient's."""
    worst_tensor: str
    worst_difference: float
    micro_steps: int
    targets: int
    """Trained tokens, each found in exactly one durable record."""
    calls: int
    episodes: int

    @property
    def equal(self) -> bool:
        return self.difference <= TOLERANCE

    def describe(self) -> str:
        verdict = "equal" if self.equal else "DIFFERENT"
        return (
            f"step {self.step} of {self.run} (version {self.version} → {self.version + 1}): gradient {verdict}, "
            f"relative difference {self.difference:.2e} over {self.micro_steps} micro-steps "
            f"(worst tensor {self.worst_tensor}: {self.worst_difference:.2e}); "
            f"{self.targets} trained tokens, each in exactly one record, of {self.calls} calls, "
            f"{self.episodes} episodes"
        )


def replay_step(settings: Settings, run: str, step: int) -> StepReplay:
    """Raises UsageError when there is nothing to replay, ProvenanceError when a trained token can't be proven."""
    warnings.filterwarnings("ignore", module="megatron")  # it misses Transformer Engine and Apex, aloud
    blobs = BlobStore(settings.blobs)
    result, config = _recorded(blobs, run, step)
    from infra.megatron.checkpoint import load_candidate
    from infra.megatron.replay import recompute_gradient

    candidate = load_candidate(blobs, result.candidate_ref)
    if not candidate.micro_steps:
        raise UsageError(f"step {step} of {run} had no gradient: version {result.version} equals the one before")
    if candidate.gradient_ref is None:
        raise UsageError(
            f"step {step} of {run} kept no gradient: set record_gradients = true in the run's configuration"
        )
    micro_steps = [MicroStep.from_bytes(blobs.get(ref)) for ref in candidate.micro_steps]
    episodes = sorted({episode for micro_step in micro_steps for episode in micro_step.episodes})
    proof = verify_provenance(micro_steps, {name: load_episode(blobs, name)[1] for name in episodes})
    replayed = recompute_gradient(result.candidate_ref, blobs, Path(config.policy))
    return StepReplay(
        run=run,
        step=step,
        version=candidate.base_version,
        difference=replayed.difference,
        worst_tensor=replayed.worst,
        worst_difference=replayed.per_tensor[replayed.worst],
        micro_steps=replayed.micro_steps,
        targets=proof.targets,
        calls=proof.calls,
        episodes=proof.episodes,
    )


def _recorded(blobs: BlobStore, run: str, step: int) -> tuple[StepResult, RunConfig]:
    with recorded(run, step):
        config = RunConfig.model_validate_json(blobs.get_named(config_name(run)))
        result = StepResult.model_validate_json(blobs.get_named(step_name(run, step)))
    if not result.train:
        raise UsageError(f"step {step} of {run} is an evaluation: it has no gradient")
    return result, config
