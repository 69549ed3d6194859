"""Starts an episode's supervisor, or adopts the one that is there, and waits for what it leaves.

Invariant: on this host an episode has one supervisor, and so one harness, at most. The folder's lock is handed to
the supervisor when it is started and held by it to its end: whoever gets the lock knows that nobody runs the
episode, and whoever doesn't finds out who does. Across hosts the lease in Redis decides. Calling anything here
again, after whatever crash of the caller, finds the same episode in the same place.

An episode's folder:

    lock              held by the supervisor, or by a launch that is starting one
    spec.json         what the supervisor was told (it holds the API key: readable by the owner only)
    supervisor.json   its pid, start time and generation
    workspace/ home/  the harness's writable folders; preserved for grading, and for a generation that resumes
    instruction.md    what the harness is told
    harness.log       its output; supervisor.log is the supervisor's own
    cancel            made by whoever wants the episode ended
    exit.json         how it ended; written last

It knows how an episode is run on this machine; it does not know rewards, records or workflows.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.episodes.processes import ended, reap, signal_named, spawn, start_time
from infra.files import remove_tree, tail
from infra.harness.harness import INSTRUCTION, Harness, Session
from infra.sandbox.spec import BASE_ENVIRONMENT, BASE_URL, Bind, Sandbox, SandboxLimits, SandboxSpec
from infra.state import keys
from infra.state.redis import redis_address
from infra.tasks.harbor import NOT_COPIED, Task

Model = TypeVar("Model", bound=BaseModel)

STATUS_FD: Final = 3
DEFAULT_MEMORY_MB: Final = 4096
LAUNCH_DEADLINE_S: Final = 60.0
TRANSIENT: Final = ("exit.json", "supervisor.json", "cancel", "harness.log", "supervisor.log", "spec.json")


class LaunchFailed(RuntimeError):
    """The supervisor could not be started, or a folder stays locked by nobody who says who they are."""


class Superseded(RuntimeError):
    """A newer generation of the episode is, or was, here."""


class SupervisorLost(RuntimeError):
    """The supervisor died without saying how the episode ended. Nothing of its harness runs any more."""


class EpisodeLaunch(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    episode: str
    generation: int = Field(ge=0)
    """Larger for each start of the episode; an older one never runs beside a newer."""
    resume: bool = False
    """Go on in the workspace and HOME that the generation before left, by the harness's own resume."""
    folder: Path
    """The episode's own, on a local file system."""
    task: Task
    api_key: str = Field(repr=False)
    model: str
    """Name under which the harness asks for the policy."""
    context_limit: int = Field(default=32768, ge=2)
    """What the harness is told of the context: tokens of prompt and output of a call."""
    max_output: int = Field(default=1024, ge=1)
    """What it is told of a turn: sampled tokens at most."""
    proxy_socket: Path
    redis_url: str = Field(repr=False)
    budget_s: float = Field(gt=0)
    """Seconds of active time: wall time without what the gateway held calls for."""
    wall_limit_s: float = Field(gt=0)
    """Seconds of wall time, whatever was held."""
    grace_s: float = Field(default=5.0, ge=0)
    """Seconds between asking the harness to end and killing it."""
    lease_ttl_s: float = Field(default=30.0, gt=0)

    def session(self) -> Session:
        """What the harness is told. Its session id is the same in every generation of the episode."""
        return Session(
            base_url=BASE_URL,
            api_key=self.api_key,
            model=self.model,
            context_limit=self.context_limit,
            max_output=min(self.max_output, self.context_limit - 1),
            session_id=str(uuid.uuid5(uuid.NAMESPACE_URL, f"gyre:{self.episode}")),
        )


class Exit(BaseModel):
    """How the harness ended. Times in seconds; ``cpu_s`` is the sandbox's processor time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: Literal["exited", "timed_out", "lease_lost", "cancelled", "failed_to_start"]
    exit_code: int | None
    """Of the harness; 128 + n or negative when a signal ended it; None when it wasn't started."""
    wall_s: float
    held_s: float
    active_s: float
    cpu_s: float
    generation: int
    detail: str = ""


class Registration(BaseModel):
    """The supervisor that a folder names as its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    start: int
    generation: int

    def alive(self) -> bool:
        return start_time(self.pid) == self.start


@dataclass(frozen=True)
class Running:
    """An episode that runs on this host, or has ended here."""

    episode: str
    generation: int
    folder: Path
    mode: Literal["started", "adopted", "finished"]
    supervisor: Registration | None
    """None for a finished one."""
    sandbox: Sandbox

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def log(self) -> Path:
        return self.folder / "harness.log"


async def launch_or_adopt(launch: EpisodeLaunch, harness: Harness, sandbox: Sandbox) -> Running:
    """Make sure that this generation of the episode runs here, or has run. A generation is started once.

    An older generation that still runs on this host is cancelled first. Raises SupervisorLost (this generation was
    started and then lost: what it left of calls and files must not be mixed with a new start, which takes a newer
    generation; or it shall resume and there is nothing to resume here), Superseded, LaunchFailed, SandboxStuck, and
    OSError when the task's files can't be copied.
    """
    folder = launch.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LAUNCH_DEADLINE_S
    cancelled: set[Registration] = set()

    def running(mode: Literal["started", "adopted", "finished"], supervisor: Registration | None) -> Running:
        return Running(launch.episode, launch.generation, folder, mode, supervisor, sandbox)

    while time.monotonic() < deadline:
        if _finished(folder, launch.generation):
            return running("finished", None)
        lock = _try_lock(folder)
        if lock is not None:
            # in a thread that finishes even if this call is cancelled: the lock never outlives what it protects
            if (started := await asyncio.to_thread(_start, launch, folder, harness, sandbox, lock)) is None:
                return running("finished", None)
            return running("started", started)
        registered = _registration(folder)
        if registered is not None and registered.alive():
            if registered.generation > launch.generation:
                raise Superseded(f"{launch.episode}: generation {registered.generation} runs in {folder}")
            if registered.generation == launch.generation:
                return running("adopted", registered)
            if registered not in cancelled:
                cancelled.add(registered)
                signal_named(registered.pid, registered.start, signal.SIGTERM)
        await asyncio.sleep(0.02)
    raise LaunchFailed(f"{folder / 'lock'} stays held, by no supervisor that {folder / 'supervisor.json'} names")


async def wait(running: Running, on_beat: Callable[[], None] = lambda: None, *, beat_s: float = 5.0) -> Exit:
    """Wait for the end of the episode, calling ``on_beat`` every ``beat_s`` seconds. Raises SupervisorLost and
    SandboxStuck.

    Cancelling the wait leaves the episode running, to be adopted.
    """
    registered = running.supervisor
    if registered is not None:
        while registered.alive():
            if await ended(registered.pid, beat_s):
                break
            on_beat()
        reap(registered.pid)
    if (exit_ := read_exit(running.folder)) is not None and exit_.generation == running.generation:
        return exit_
    # the kernel is ending what is left: it dies with its supervisor
    await asyncio.to_thread(running.sandbox.clear, running.workspace)
    raise SupervisorLost(_lost(running.episode, registered, running.folder))


async def stop(running: Running, *, patience_s: float = 30.0) -> Exit | None:
    """Cancel the episode; returns once nothing of it runs, with its exit, or None if the supervisor left none."""
    registered = running.supervisor
    if registered is not None and registered.alive():
        (running.folder / "cancel").touch()
        signal_named(registered.pid, registered.start, signal.SIGTERM)
        if not await ended(registered.pid, patience_s):
            signal_named(registered.pid, registered.start, signal.SIGKILL)
    try:
        return await wait(running)
    except SupervisorLost:
        return None


def read_exit(folder: Path) -> Exit | None:
    """What the last supervisor in ``folder`` left; None while there is nothing."""
    return _read(Exit, folder / "exit.json")


def _lost(episode: str, supervisor: Registration | None, folder: Path) -> str:
    who = f"supervisor {supervisor.pid} of generation {supervisor.generation}" if supervisor else "the supervisor"
    return f"{episode}: {who} left no exit.json in {folder}: {tail(folder / 'supervisor.log') or 'killed'}"


def _registration(folder: Path) -> Registration | None:
    return _read(Registration, folder / "supervisor.json")


def _read(model: type[Model], file: Path) -> Model | None:
    try:
        return model.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise LaunchFailed(f"{file} is not what a supervisor writes: {error}") from error


def _finished(folder: Path, generation: int) -> bool:
    exit_ = read_exit(folder)
    if exit_ is not None and exit_.generation > generation:
        raise Superseded(f"generation {exit_.generation} has ended in {folder}")
    return exit_ is not None and exit_.generation == generation


def _try_lock(folder: Path) -> int | None:
    """Descriptor of the folder's lock, or None while another holds it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _start(launch: EpisodeLaunch, folder: Path, harness: Harness, sandbox: Sandbox, lock: int) -> Registration | None:
    """With the lock held: prepare the folder and start the supervisor; None when the episode has just ended."""
    try:
        if _finished(folder, launch.generation):
            return None
        before = _registration(folder)
        if before is not None and before.generation > launch.generation:
            raise Superseded(f"{launch.episode}: generation {before.generation} was started in {folder}")
        if (folder / "spec.json").exists():
            sandbox.clear(folder / "workspace")
        if before is not None and before.generation == launch.generation:
            raise SupervisorLost(_lost(launch.episode, before, folder))
        spent_s = _spent(folder) if launch.resume else 0.0
        _prepare(launch, folder, harness)
        spec = _supervisor_spec(launch, folder, harness, sandbox, before) | {"lock_fd": lock, "spent_s": spent_s}
        descriptor = os.open(folder / "spec.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as stream:
            json.dump(spec, stream)
        supervisor = Path(__file__).with_name("supervisor.py").absolute()
        argv = [sys.executable, "-I", "-S", "-B", str(supervisor), str(folder / "spec.json")]
        pid = spawn(argv, {"PATH": BASE_ENVIRONMENT["PATH"]}, folder / "supervisor.log", detached=True, keep_fd=lock)
    finally:
        os.close(lock)
    deadline = time.monotonic() + LAUNCH_DEADLINE_S
    while time.monotonic() < deadline:
        registered = _registration(folder)
        if registered is not None and registered.pid == pid:
            return registered
        if reap(pid) is not None:
            break
        time.sleep(0.005)
    raise LaunchFailed(f"the supervisor in {folder} did not start: {tail(folder / 'supervisor.log') or 'no message'}")


def can_resume(folder: Path, harness: Harness, session: Session) -> bool:
    """Whether a generation that was lost here left what its harness could resume."""
    left = all((folder / name).is_dir() for name in ("workspace", "home"))
    return left and harness.resume_command(session) is not None


def dead_supervisor(folder: Path) -> str:
    """Under what name (``generation:pid``) the supervisor that ended here last held its lease; "" when there was none,
    or it runs. So a lease that it could not give back needn't be waited for."""
    registered = _registration(folder)
    return "" if registered is None or registered.alive() else f"{registered.generation}:{registered.pid}"


def _spent(folder: Path) -> float:
    """Seconds of wall time that the generations took which are resumed now. A supervisor touches its log as it lives.

    At least a little, so that the supervisor knows that it resumes.
    """
    try:
        earlier = float(json.loads((folder / "spec.json").read_bytes())["spent_s"])
        lived = (folder / "supervisor.log").stat().st_mtime - (folder / "supervisor.json").stat().st_mtime
    except (FileNotFoundError, ValueError, LookupError):
        return 0.001  # it was lost before it began
    return earlier + max(lived, 0.001)


def _prepare(launch: EpisodeLaunch, folder: Path, harness: Harness) -> None:
    session = launch.session()
    if launch.resume and not can_resume(folder, harness, session):
        raise SupervisorLost(f"{launch.episode}: {folder} holds nothing that {harness.name} could resume")
    for name in TRANSIENT:
        (folder / name).unlink(missing_ok=True)
    if not launch.resume:
        _fresh(launch, folder)
    for name, text in harness.files(session).items():
        _write_below(folder / "home", name, text)
    (folder / "instruction.md").write_text(launch.task.instruction, encoding="utf-8")


def _fresh(launch: EpisodeLaunch, folder: Path) -> None:
    for name in ("workspace", "home"):
        remove_tree(folder / name)
    source = launch.task.environment_folder
    if source.is_dir():

        def left_out(directory: str, names: list[str]) -> list[str]:
            return [name for name in names if name in NOT_COPIED] if directory == str(source) else []

        shutil.copytree(source, folder / "workspace", symlinks=True, ignore=left_out)
    else:
        (folder / "workspace").mkdir()
    (folder / "home").mkdir()


def _write_below(home: Path, name: str, text: str) -> None:
    """Write a file of the harness's. In a HOME that an agent has had, links may lead out of it: they are replaced."""
    place = home
    *folders, last = Path(name).parts
    for part in folders:
        place /= part
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            place.unlink()
        place.mkdir(exist_ok=True)
    part_file = place / f".{last}.part"
    part_file.unlink(missing_ok=True)
    descriptor = os.open(part_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    part_file.replace(place / last)


def _supervisor_spec(
    launch: EpisodeLaunch, folder: Path, harness: Harness, sandbox: Sandbox, before: Registration | None
) -> dict[str, Any]:
    environment = launch.task.environment
    memory_mb = None
    if harness.address_space_mb is not None:
        memory_mb = (environment.memory_mb or DEFAULT_MEMORY_MB) + harness.address_space_mb
    session = launch.session()
    argv = harness.resume_command(session) if launch.resume else harness.command(INSTRUCTION, session)
    sandbox_spec = SandboxSpec(
        argv=tuple(argv or ()),
        workspace=folder / "workspace",
        home=folder / "home",
        binds=(Bind(source=folder / "instruction.md", target=INSTRUCTION), *harness.binds()),
        proxy_socket=launch.proxy_socket.absolute(),
        limits=SandboxLimits(address_space_mb=memory_mb),
        status_fd=STATUS_FD,
    )
    return {
        "episode": launch.episode,
        "generation": launch.generation,
        "folder": str(folder),
        "argv": sandbox.command(sandbox_spec),
        "environment": {**BASE_ENVIRONMENT, **environment.env, **harness.environment(session)},
        "status_fd": STATUS_FD,
        "redis": redis_address(launch.redis_url),
        "lease_key": keys.lease(launch.episode),
        "generation_key": keys.generation_of(launch.episode),
        "held_key": keys.held(launch.episode),
        "holding_key": keys.holding(launch.episode),
        "lease_ttl_s": launch.lease_ttl_s,
        # the lock is ours, so whoever was registered here is dead and its lease may be taken at once
        "supersedes": f"{before.generation}:{before.pid}" if before else "",
        "budget_s": launch.budget_s,
        "wall_limit_s": launch.wall_limit_s,
        "grace_s": launch.grace_s,
    }
