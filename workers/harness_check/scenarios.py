"""How a scenario is run: a real harness in a real sandbox, against the scripted policy, as an episode of its own.

kill -9 goes to the supervisor, as it would be lost in earnest; a newer generation then resumes. What must hold at the
end is in ``verify``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from redis.asyncio import Redis

from infra.episodes.launch import EpisodeLaunch, Exit, Running, SupervisorLost, launch_or_adopt, stop, wait
from infra.files import tail
from infra.harness.harness import Harness
from infra.sandbox.bubblewrap import Bubblewrap
from infra.state import keys
from infra.state.redis import as_bytes
from infra.tasks.harbor import load_task
from trajectory.records import CallRecord, decode_chain
from workers.harness_check import plans
from workers.harness_check.catalogue import Scenario
from workers.harness_check.hands import HANDS
from workers.harness_check.network import FaultyRelay
from workers.harness_check.policy import ScriptedPolicyEngine
from workers.harness_check.verify import Finding, counts, kinds, verify
from workers.harness_check.world import World

MODEL: Final = "gyre-policy"
WALL_S: Final = 240.0
KILL_WAIT_S: Final = 60.0
TASK_TOML: Final = """schema_version = "1.3"
[agent]
timeout_sec = 300.0
[verifier]
timeout_sec = 20.0
[environment]
network_mode = "no-network"
"""


@dataclass(frozen=True)
class Report:
    harness: str
    version: str
    scenario: str
    seconds: float
    calls: int
    counts: dict[str, int]
    kinds: dict[str, int]
    forks: dict[str, int]
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)


async def run_scenario(world: World, harness: Harness, scenario: Scenario) -> Report:
    """Run one scenario to its end. Raises HarnessUnavailable, LaunchFailed and SandboxStuck."""
    begun = time.monotonic()
    hands = HANDS[harness.name]
    engine = ScriptedPolicyEngine(world.renderer, scenario.plan(hands), hands.shell)
    await world.serve(engine)
    relay = FaultyRelay(world.socket, world.folder / f"{harness.name}-{scenario.name}.net" / "n.sock", scenario.faults)
    episode = _Episode(world, harness, scenario, engine, relay.path if scenario.faults else world.socket)
    released = asyncio.create_task(_release(engine, scenario.hold_s)) if scenario.hold_s else None
    try:
        async with relay.serving():
            exit_, running = await (episode.with_kills() if scenario.kills else episode.plain())
    finally:
        await episode.end()
        if released is not None:
            released.cancel()
    records = await episode.records()
    findings = [
        _ended(exit_, running),
        *verify(records, engine.requests, dict(scenario.kinds), scenario.turns),
        _written(running.workspace, scenario.files),
        Finding("it isn't counted as truncated", not await world.redis.exists(keys.truncated(episode.name))),
        Finding(
            "every fault took place", sorted(relay.done) == sorted(scenario.faults.values()), ", ".join(relay.done)
        ),
        Finding("the policy knew every prompt", not engine.lost, "; ".join(engine.lost[:1])),
        Finding("the transcript is where the adapter says", _transcript(running, harness), harness.transcript),
    ]
    return Report(
        harness=harness.name,
        version=harness.version,
        scenario=scenario.name,
        seconds=round(time.monotonic() - begun, 1),
        calls=len(records),
        counts=counts(records) | await _replayed(world.redis, episode.name),
        kinds=kinds(records),
        forks=_forks(records),
        findings=findings,
    )


async def _release(engine: ScriptedPolicyEngine, after_s: float) -> None:
    await engine.holding.wait()
    await asyncio.sleep(after_s)
    engine.release.set()


class _Episode:
    def __init__(
        self, world: World, harness: Harness, scenario: Scenario, engine: ScriptedPolicyEngine, proxy_socket: Path
    ) -> None:
        self._world, self._harness, self._scenario, self._engine = world, harness, scenario, engine
        self._socket = proxy_socket
        self.name = f"check/{harness.name}/{scenario.name}"
        self._folder = world.folder / harness.name / scenario.name
        self._sandbox = Bubblewrap()
        self._running: Running | None = None

    async def plain(self) -> tuple[Exit | None, Running]:
        running = await self._start(1)
        return await self._wait(running), running

    async def with_kills(self) -> tuple[Exit | None, Running]:
        """kill -9 of the supervisor, with which the kernel ends the sandbox; each time a newer generation resumes."""
        running = await self._start(1)
        started = running.workspace / "started"
        await self._kill(running, started.exists)
        running = await self._start(2)
        await self._kill(running, self._engine.holding.is_set)
        self._engine.release.set()
        running = await self._start(3)
        return await self._wait(running), running

    async def records(self) -> list[CallRecord]:
        return decode_chain(map(as_bytes, await self._world.redis.lrange(keys.calls(self.name), 0, -1)))

    async def _start(self, generation: int) -> Running:
        world, scenario = self._world, self._scenario
        api_key = f"gyre-check-{generation}-{os.urandom(12).hex()}"
        stands_for = keys.EpisodeKey(
            episode=self.name,
            generation=generation,
            min_version=0,
            max_version=0,
            temperature=1.0,
            max_new_tokens=4000,
            context_limit=scenario.context_limit,
            max_calls=200,
            harness=self._harness.name,
            patience_s=self._harness.patience_s,
            early_stream=self._harness.early_stream,
        )
        await world.redis.set(keys.generation_of(self.name), generation)
        await world.redis.set(keys.key(api_key), stands_for.model_dump_json())
        launch = EpisodeLaunch(
            episode=self.name,
            generation=generation,
            resume=generation > 1,
            folder=self._folder,
            task=load_task(_write_task(self._folder.with_name(f"{scenario.name}-task"))),
            api_key=api_key,
            model=MODEL,
            context_limit=scenario.told_context,
            max_output=4000,
            proxy_socket=self._socket,
            redis_url=world.redis_url,
            budget_s=WALL_S + scenario.hold_s,
            wall_limit_s=WALL_S + scenario.hold_s,
        )
        self._running = await launch_or_adopt(launch, self._harness, self._sandbox)
        return self._running

    async def end(self) -> None:
        """Whatever happens, nothing of the episode is left running: its supervisor would outlive this process."""
        if self._running is not None:
            await stop(self._running)

    async def _wait(self, running: Running) -> Exit | None:
        try:
            return await wait(running)
        except SupervisorLost:
            return None

    async def _kill(self, running: Running, condition: Callable[[], bool]) -> None:
        """Once the condition holds; if it never does, the checks at the end say what is missing."""
        supervisor = running.supervisor
        deadline = time.monotonic() + KILL_WAIT_S
        while not condition() and supervisor is not None and supervisor.alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # the harness writes its transcript behind the event that was awaited
        if supervisor is not None and supervisor.alive():
            os.kill(supervisor.pid, signal.SIGKILL)
        await self._wait(running)


def _write_task(folder: Path) -> Path:
    for name, text in plans.FILES.items():
        (folder / "environment").mkdir(parents=True, exist_ok=True)
        (folder / "environment" / name).write_text(text, encoding="utf-8")
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "tests" / "test.sh").write_text("exit 0\n")
    (folder / "task.toml").write_text(TASK_TOML)
    (folder / "instruction.md").write_text(plans.TASK, encoding="utf-8")
    return folder


def _ended(exit_: Exit | None, running: Running) -> Finding:
    ok = exit_ is not None and exit_.reason == "exited" and exit_.exit_code == 0
    how = "no exit" if exit_ is None else f"{exit_.reason}, code {exit_.exit_code}, {exit_.wall_s:.1f} s"
    return Finding("the harness finished", ok, how if ok else f"{how}: {tail(running.log, 600)}")


def _written(workspace: Path, files: Mapping[str, str]) -> Finding:
    wrong = []
    for name, text in files.items():
        file = workspace / name
        found = file.read_text(encoding="utf-8") if file.is_file() else None
        if found != text:
            wrong.append(f"{name}: {found!r}, not {text!r}")
    return Finding("the tools did their work", not wrong, "; ".join(wrong))


def _transcript(running: Running, harness: Harness) -> bool:
    return not harness.transcript or (running.folder / "home" / harness.transcript).exists()


async def _replayed(redis: Redis, episode: str) -> dict[str, int]:
    """Turns that were delivered again."""
    return {"replayed": int(await redis.hget(keys.counts(episode), "replayed") or 0)}


def _forks(records: list[CallRecord]) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in records:
        if record.fork:
            found[record.fork] = found.get(record.fork, 0) + 1
    return found
