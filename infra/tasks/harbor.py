"""Tasks in Harbor's on-disk format: a folder that says what to do, where, and how the result is graded.

    task.toml        schema_version, [agent], [verifier] and [environment] settings
    instruction.md   what the agent is told
    environment/     the workspace's files before the agent starts; its Dockerfile is for sandboxes that build images
    tests/test.sh    writes a reward to /logs/verifier; mounted only once the agent is gone

What is loaded can be run as it stands: a setting that gyre cannot honour is refused here, by name, instead of being
dropped on the way. It reads task folders; it knows nothing of sandboxes, harnesses or rewards.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

NOT_COPIED: Final = ("Dockerfile", ".dockerignore")
"""Files of ``environment/`` that describe an image and are no part of the workspace."""

UNSUPPORTED: Final = ("docker-compose.yaml", "docker-compose.yml")

INERT_KEYS: Final = frozenset({"metadata", "task", "source", "solution", "oracle", "author"})
"""Keys of task.toml that describe the task and change nothing about how it runs."""


class TaskInvalid(ValueError):
    """A task folder is not what gyre can run. The message names the file and how to mend it."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class AgentSettings(_Section):
    timeout_sec: float | None = Field(default=None, gt=0)
    """Seconds that the agent may take; None leaves it to the run's budget."""


class VerifierSettings(_Section):
    timeout_sec: float = Field(default=600.0, gt=0)
    """Seconds that the verifier may take."""
    env: dict[str, str] = {}
    """Environment variables of the verifier, besides those of the environment."""


class EnvironmentSettings(_Section):
    docker_image: str | None = None
    """For sandboxes that run images; bubblewrap lends the host's own userland."""
    build_timeout_sec: float | None = None
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: Literal[0] = 0
    network_mode: Literal["no-network"] = "no-network"
    """An episode has no way out but the model gateway, whose answers are the only ones that are recorded."""
    env: dict[str, str] = {}
    """Environment variables of agent and verifier."""


class Task(BaseModel):
    """One task, read once; the folder may not change while episodes of it run."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Name of the folder."""
    folder: Path
    instruction: str
    agent: AgentSettings
    verifier: VerifierSettings
    environment: EnvironmentSettings

    @property
    def environment_folder(self) -> Path:
        """Files that the workspace starts with, besides ``NOT_COPIED``; may be absent."""
        return self.folder / "environment"

    @property
    def tests_folder(self) -> Path:
        return self.folder / "tests"


def list_tasks(folder: Path) -> list[str]:
    """Sorted names of the task folders (those with a task.toml) in ``folder``. Raises TaskInvalid if there is none."""
    if not folder.is_dir():
        raise TaskInvalid(f"{folder}: no such folder; name a folder with one sub-folder for each task")
    return sorted(entry.name for entry in folder.iterdir() if (entry / "task.toml").is_file())


def load_task(path: Path) -> Task:
    """Read the task in the folder ``path``. Raises TaskInvalid."""
    settings_file = path / "task.toml"
    try:
        settings = tomllib.loads(_text(settings_file, "write one with schema_version, [agent] and [verifier]"))
    except tomllib.TOMLDecodeError as error:
        raise TaskInvalid(f"{settings_file}: not TOML: {error}") from error
    _check_version(settings_file, settings)
    instruction = _text(path / "instruction.md", "write what the agent is to do")
    if not instruction.strip():
        raise TaskInvalid(f"{path / 'instruction.md'}: empty; write what the agent is to do")
    _text(path / "tests" / "test.sh", "write the verifier: it puts a number in /logs/verifier/reward.txt")
    for name in UNSUPPORTED:
        if (path / "environment" / name).exists():
            raise TaskInvalid(f"{path / 'environment' / name}: services beside the agent's sandbox aren't supported")
    sections = {name: settings.pop(name, {}) for name in ("agent", "verifier", "environment")}
    _normalise_network(settings_file, sections["environment"])
    try:
        task = Task(name=path.name, folder=path.absolute(), instruction=instruction, **sections)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise TaskInvalid(f"{settings_file}: {where}: {first['msg']} (is {first['input']!r})") from error
    _refuse_unknown(settings_file, "", {key: value for key, value in settings.items() if key not in INERT_KEYS})
    for name, section in (("agent", task.agent), ("verifier", task.verifier), ("environment", task.environment)):
        _refuse_unknown(settings_file, f"{name}.", section.model_extra or {})
    for name, variables in (("verifier", task.verifier.env), ("environment", task.environment.env)):
        for variable, value in variables.items():
            if "${" in value:
                raise TaskInvalid(f"{settings_file}: {name}.env.{variable}: write the value itself, not {value!r}")
    return task


def _text(file: Path, mend: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise TaskInvalid(f"{file}: missing; {mend}") from None
    except UnicodeDecodeError as error:
        raise TaskInvalid(f"{file}: not UTF-8 at byte {error.start}") from error


def _check_version(file: Path, settings: dict[str, Any]) -> None:
    version = settings.pop("schema_version", settings.pop("version", None))
    if version is None:
        raise TaskInvalid(f'{file}: schema_version is missing; write schema_version = "1.3"')
    if not str(version).startswith("1."):
        raise TaskInvalid(f"{file}: schema_version {version!r} isn't known; gyre reads versions 1.x")
    for name in ("agent", "verifier", "environment"):
        if not isinstance(settings.get(name, {}), dict):
            raise TaskInvalid(f"{file}: {name}: write it as a table, [{name}]")


def _normalise_network(file: Path, environment: dict[str, Any]) -> None:
    """Harbor's older ``allow_internet``, and a clear word for a task that wants the network."""
    if environment.pop("allow_internet", False):
        environment["network_mode"] = "public"
    mode = environment.get("network_mode", "no-network")
    if mode in ("public", "allowlist"):
        raise TaskInvalid(
            f"{file}: environment.network_mode: an episode has no network but the model gateway; "
            f'write network_mode = "no-network" if the task can do without (is {mode!r})'
        )


def _refuse_unknown(file: Path, prefix: str, keys: dict[str, Any]) -> None:
    """Empty values ask for nothing and pass; everything else would be dropped, which is worse than an error."""
    for key, value in keys.items():
        if value not in ("", [], {}, None, False):
            raise TaskInvalid(f"{file}: {prefix}{key}: gyre cannot honour it; remove it (is {value!r})")
