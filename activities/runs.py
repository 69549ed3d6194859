"""Control activities of a run: validate it before anything starts, and commit what a step has made.

A candidate is committed by the step's history; `LATEST` and the step's manifest follow, each written atomically, the
manifest before the pointer to it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.gauges import expose, step_gauges
from activities.plugins import check_plugins
from activities.services import Services
from infra.harness.harness import HarnessUnavailable
from infra.harness.registry import harness_named
from infra.settings import Settings
from infra.state.blobs import BlobMissing
from infra.state.record_names import config_name, latest_name, step_name
from infra.tasks.harbor import TaskInvalid, list_tasks, load_task
from trajectory.gauges import summary
from trajectory.plugins import PluginError
from workflows.contracts.configuration import RunConfig
from workflows.contracts.orders import CommitInput, Committed
from workflows.contracts.results import RunFacts, StepResult


class ConfigurationError(ValueError):
    """A run configuration names something that is not there. The message says what, where and how to mend it."""


def check_config(config: RunConfig, settings: Settings) -> tuple[int, int]:
    """Counts of training and held-out tasks; raises ConfigurationError, touching nothing."""
    policy = Path(config.policy)
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (policy / file).is_file():
            raise ConfigurationError(
                f"policy: {policy / file} is missing; `gyre quickstart` prepares the tiny policy, any Hugging Face "
                "folder with safetensors does as well"
            )
    counts = []
    for field, folder in (("tasks.train", config.tasks.train), ("tasks.heldout", config.tasks.heldout)):
        if not folder:
            counts.append(0)
            continue
        try:
            names = list_tasks(Path(folder))
            if names:
                load_task(Path(folder) / names[0])
        except (TaskInvalid, OSError) as error:
            raise ConfigurationError(f"{field}: {error}") from error
        if not names:
            raise ConfigurationError(f"{field}: {folder} holds no task folders")
        counts.append(len(names))
    if not counts[0]:
        raise ConfigurationError("tasks.train: name a folder of tasks")
    try:
        harness_named(config.harness, settings.harnesses).check()
    except (HarnessUnavailable, KeyError) as error:
        raise ConfigurationError(f"harness: {error}") from error
    try:
        check_plugins()
    except PluginError as error:
        raise ConfigurationError(str(error)) from error
    return counts[0], counts[1]


class RunActivities:
    def __init__(self, services: Services) -> None:
        self._blobs = services.blobs
        self._settings = services.settings

    @activity.defn(name="inspect_run")
    async def inspect_run(self, config: RunConfig) -> RunFacts:
        try:
            train, heldout = check_config(config, self._settings)
        except ConfigurationError as error:
            raise ApplicationError(str(error), type="ConfigurationError", non_retryable=True) from error
        from infra.megatron.checkpoint import initial_candidate  # torch: only now

        ref = await asyncio.to_thread(initial_candidate, self._blobs, config.name, Path(config.policy))
        self._blobs.put_named(config_name(config.name), config.model_dump_json(indent=1).encode())
        return RunFacts(train_tasks=train, heldout_tasks=heldout, candidate_ref=ref)

    @activity.defn(name="commit_candidate")
    async def commit_candidate(self, commit: CommitInput) -> Committed:
        """The step's gauges and manifest, then LATEST. Repeating it changes nothing; LATEST never goes back."""
        committed, result = Committed(), commit.result
        if commit.gauges is not None:
            gauges = await step_gauges(self._blobs, commit.gauges, train=result.train)
            ref = self._blobs.put(gauges.model_dump_json(indent=1).encode())
            committed = Committed(gauges=summary(gauges), gauges_ref=ref)
            result = result.model_copy(update={"gauges": committed.gauges, "gauges_ref": ref})
            expose(activity.metric_meter(), result, gauges)
        self._blobs.put_named(step_name(commit.run, commit.step), result.model_dump_json(indent=1).encode())
        if not commit.result.train:
            return committed
        try:
            latest = StepResult.model_validate_json(self._blobs.get_named(latest_name(commit.run)))
        except BlobMissing:
            latest = None
        if latest is None or latest.version < commit.version:
            self._blobs.put_named(latest_name(commit.run), result.model_dump_json(indent=1).encode())
        return committed
