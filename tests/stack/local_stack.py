"""A whole local stack for tests: every real process, on ports and in a folder of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.settings import Settings
from trajectory.config import OptimizerConfig, TrajectoryConfig
from workflows.contracts.configuration import EvaluationConfig, RunConfig, SamplingConfig, SchedulerConfig, TaskSets

GYRE = str(Path(sys.executable).parent / "gyre")


@dataclass
class LocalStack:
    settings: Settings
    tasks: TaskSets

    def environment(self) -> dict[str, str]:
        values = self.settings.model_dump(mode="json")
        return {**os.environ, **{f"GYRE_{name.upper()}": str(value) for name, value in values.items()}}

    def gyre(self, *arguments: str, timeout: float = 300, code: int = 0) -> str:
        done = subprocess.run(
            [GYRE, *arguments], env=self.environment(), capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == code, f"gyre {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.gyre(*arguments, "--json"))

    def config(self, name: str, **changes: Any) -> RunConfig:
        """A small run: 4 tasks × 4 episodes a step, in a few micro-steps."""
        fields: dict[str, Any] = {
            "name": name,
            "policy": str(self.settings.policy),
            "tasks": self.tasks,
            "task_order": "given",
            "steps": 2,
            "tasks_per_step": 4,
            "group_size": 4,
            "sampling": SamplingConfig(max_new_tokens=48, context_limit=4096, max_calls=20),
            "optimizer": OptimizerConfig(lr=7e-4),
            "trajectory": TrajectoryConfig(token_budget=512),
            "evaluation": EvaluationConfig(every=0),
            "scheduler": SchedulerConfig(satellite_s=5),
        }
        return RunConfig.model_validate({**fields, **changes})

    def submit(self, config: RunConfig) -> None:
        file = self.settings.root / f"{config.name}.toml"
        file.write_text(to_toml(config.model_dump(mode="json", exclude_none=True)))
        self.gyre("submit", "run", str(file))

    def pid(self, process: str) -> int:
        state = json.loads((self.settings.root / "stack.json").read_text())
        return int(state["processes"][process]["pid"])

    async def kill_and_see_restarted(self, process: str) -> None:
        before = self.pid(process)
        os.kill(before, signal.SIGKILL)
        await self.until(f"{process} is started again", lambda: self.pid(process) != before, 30)

    async def until(self, what: str, holds: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            await asyncio.sleep(0.2)

    async def finished(self, run: str, seconds: float = 240) -> list[dict[str, Any]]:
        """Results of a run that completes, one per step."""
        view: dict[str, Any] = {}

        def ended() -> bool:
            view.update(self.json("watch", run))
            return view["status"] != "RUNNING"

        await self.until(f"run {run} ends", ended, seconds)
        assert view["status"] == "COMPLETED", view
        results: list[dict[str, Any]] = view["results"]
        return results


def to_toml(values: dict[str, Any], prefix: str = "") -> str:
    """Plain values and nested tables; enough for a run configuration."""
    lines, tables = [], []
    for key, value in values.items():
        if isinstance(value, dict):
            tables.append(f"[{prefix}{key}]\n" + to_toml(value, f"{prefix}{key}."))
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n" + "".join(tables)
