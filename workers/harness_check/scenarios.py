"""How a scenario is run: a real harness in a real sandbox, against the scripted policy, as an episode of its own.

kill -9 goes to the supervisor, as it would be lost in earnest; a newer generation then resumes. What must hold at the
end is in ``verify``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infra.chat.qwen3 import Qwen3Renderer
from infra.episodes.launch import EpisodeLaunch, Exit, Running, SupervisorLost, launch_or_adopt, stop, wait
from infra.files import tail
from infra.harness.harness import Harness
from infra.sandbox.bubblewrap import Bubblewrap
from infra.state import keys
from infra.tasks.harbor import load_task
from workers.harness_check import scripts
from workers.harness_check.catalogue import Scenario
from workers.harness_check.engine import Script, ScriptedEngine
from workers.harness_check.network import FaultyRelay
from workers.harness_check.policy import ScriptedPolicy
from workers.harness_check.tools import TOOLS
from workers.harness_check.verify import CheckResult, counts, kinds, verify
from workers.stack.partial import PartialStack, partial_stack, write_tokenizer

MODEL: Final = "gyre-policy"
VOCABULARY: Final = 1500
"""Of the tokenizer, which is trained on these sources: about 2 characters of English a token."""
MAX_OUTPUT: Final = 4000
"""Sampled tokens of a turn."""
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
    findings: list[CheckResult]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)


@dataclass(frozen=True)
class PrivateGateway:
    """What the scenarios of a check share: a partial stack, and the gateway that a harness in a sandbox reaches."""

    folder: Path
    stack: PartialStack
    renderer: Qwen3Renderer
    socket: Path


@asynccontextmanager
async def private_gateway() -> AsyncIterator[PrivateGateway]:
    """Everything is in one folder and gone with it. Raises UsageError."""
    with tempfile.TemporaryDirectory(prefix="gyre-check-") as name:
        folder = Path(name)
        sources = [file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))]
        renderer = Qwen3Renderer(write_tokenizer(folder / "tokenizer.json", sources, VOCABULARY))
        async with partial_stack(folder) as stack:
            socket = folder / "proxy" / "proxy.sock"
            await stack.start_gateway(renderer, socket=socket)
            yield PrivateGateway(folder, stack, renderer, socket)


async def run_scenario(private: PrivateGateway, harness: Harness, scenario: Scenario) -> Report:
    """Run one scenario to its end. Raises HarnessUnavailable, LaunchFailed and SandboxStuck."""
    begun = time.monotonic()
    tools, redis = TOOLS[harness.name], private.stack.redis
    policy = ScriptedPolicy(private.renderer, scenario.script(tools), tools.shell)
    engine = ScriptedEngine(Script(policy.say))
    private.stack.engines[scenario.name] = engine
    await private.stack.set_route("scripted", url=scenario.name, incarnation=scenario.name)
    socket = private.folder / f"{harness.name}-{scenario.name}.net" / "n.sock"
    relay = FaultyRelay(private.socket, socket, scenario.faults)
    episode = _CheckedEpisode(private, harness, scenario, engine, relay.path if scenario.faults else private.socket)
    released = asyncio.create_task(_release(engine, scenario.hold_s)) if scenario.hold_s else None
    try:
        async with relay.serving():
            exit_, running = await (episode.with_kills() if scenario.kills else episode.plain())
    finally:
        await episode.end()
        if released is not None:
            released.cancel()
    records = await private.stack.records(episode.name)
    truncated, replayed = keys.truncated(episode.name), await redis.hget(keys.counts(episode.name), "replayed")
    findings = [
        _ended(exit_, running),
        *verify(records, engine.seen, dict(scenario.kinds), scenario.turns),
        _written(running.workspace, scenario.files),
        CheckResult("it isn't counted as truncated", not await redis.exists(truncated)),
        CheckResult(
            "every fault took place", sorted(relay.done) == sorted(scenario.faults.values()), ", ".join(relay.done)
        ),
        CheckResult("the policy knew every prompt", not policy.lost, "; ".join(policy.lost[:1])),
        CheckResult("the transcript is where the adapter says", _transcript(running, harness), harness.transcript),
    ]
    return Report(
        harness=harness.name,
        version=harness.version,
        scenario=scenario.name,
        seconds=round(time.monotonic() - begun, 1),
        calls=len(records),
        counts={**counts(records), "replayed": int(replayed or 0)},
        kinds=kinds(records),
        forks=dict(Counter(record.fork for record in records if record.fork)),
        findings=findings,
    )


async def _release(engine: ScriptedEngine, after_s: float) -> None:
    await engine.holding.wait()
    await asyncio.sleep(after_s)
    engine.gate.set()


class _CheckedEpisode:
    def __init__(
        self, private: PrivateGateway, harness: Harness, scenario: Scenario, engine: ScriptedEngine, socket: Path
    ) -> None:
        """``socket``: where the harness finds the gateway."""
        self._private, self._harness, self._scenario, self._engine = private, harness, scenario, engine
        self._socket = socket
        self.name = f"check/{harness.name}/{scenario.name}"
        self._folder = private.folder / harness.name / scenario.name
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
        running = await self._start(3)
        self._engine.gate.set()  # only now: the generation that was killed may no longer record what it asked for
        return await self._wait(running), running

    async def _start(self, generation: int) -> Running:
        stack, scenario = self._private.stack, self._scenario
        api_key = await stack.add_key(
            self.name,
            f"gyre-check-{generation}-{os.urandom(12).hex()}",
            generation=generation,
            max_new_tokens=MAX_OUTPUT,
            context_limit=scenario.context_limit,
            max_calls=200,
            harness=self._harness.name,
            patience_s=self._harness.patience_s,
            early_stream=self._harness.early_stream,
        )
        await stack.redis.set(keys.generation_of(self.name), generation)
        launch = EpisodeLaunch(
            episode=self.name,
            generation=generation,
            resume=generation > 1,
            folder=self._folder,
            task=load_task(_write_task(self._folder.with_name(f"{scenario.name}-task"))),
            api_key=api_key,
            model=MODEL,
            context_limit=scenario.told_context,
            max_output=MAX_OUTPUT,
            proxy_socket=self._socket,
            redis_url=stack.redis_url,
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
    files = {f"environment/{name}": text for name, text in scripts.FILES.items()}
    files |= {"tests/test.sh": "exit 0\n", "task.toml": TASK_TOML, "instruction.md": scripts.TASK}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _ended(exit_: Exit | None, running: Running) -> CheckResult:
    ok = exit_ is not None and exit_.reason == "exited" and exit_.exit_code == 0
    how = "no exit" if exit_ is None else f"{exit_.reason}, code {exit_.exit_code}, {exit_.wall_s:.1f} s"
    return CheckResult("the harness finished", ok, how if ok else f"{how}: {tail(running.log, 600)}")


def _written(workspace: Path, files: Mapping[str, str]) -> CheckResult:
    wrong = []
    for name, expected in files.items():
        file = workspace / name
        text = file.read_text(encoding="utf-8") if file.is_file() else None
        if text != expected:
            wrong.append(f"{name}: {text!r}, not {expected!r}")
    return CheckResult("the tools did their work", not wrong, "; ".join(wrong))


def _transcript(running: Running, harness: Harness) -> bool:
    return not harness.transcript or (running.folder / "home" / harness.transcript).exists()
