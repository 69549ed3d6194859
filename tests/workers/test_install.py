"""What ``make`` installs: which Python and which build of torch it takes, what it refuses, when it starts anew.

The Makefile and ``infra/install.py`` run as they are, on a tiny project of their own: one package, a torch of a few
bytes, and indexes on loopback. Nothing is asked of any other index.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra import install

ROOT = Path(__file__).parents[2]
STAMP = ".venv/.installed"
BUILD_BACKEND = """
import pathlib, shutil
def build_editable(folder, settings=None, metadata=None):
    shutil.copy("tiny-1.0-py3-none-any.whl", folder)
    return "tiny-1.0-py3-none-any.whl"
"""


def wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel that has nothing but its metadata."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for file, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{file},sha256={digest},{len(text)}\n"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(file, text)


class Index:
    """A folder served on loopback as a package index, and how often it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests = 0
        index = self

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *arguments: object) -> None:
                index.requests += 1

        folder.mkdir()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[tuple[Index, Index]]:
    """What stands for PyPI (torch's ordinary build and its libraries), and the index that has the CPU build."""
    usual, cpu = Index(tmp_path / "usual"), Index(tmp_path / "cpu")
    wheel(usual.folder / "torch", "torch", "1.0")
    wheel(usual.folder / "tiny-cuda", "tiny_cuda", "1.0")
    wheel(usual.folder / "other", "other", "1.0")
    wheel(cpu.folder / "torch", "torch", "1.0+cpu")
    yield usual, cpu
    for index in (usual, cpu):
        index.server.shutdown()
        index.server.server_close()


class Project:
    """A checkout with gyre's Makefile and installer, and tiny locks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "infra").mkdir(parents=True)
        (folder / "programs").mkdir()
        for file in ("Makefile", "infra/install.py"):
            shutil.copy(ROOT / file, folder / file)
        (folder / "requirements.lock").write_text("torch==1.0\nother==1.0\n")
        (folder / "requirements-cuda.lock").write_text("tiny-cuda==1.0\n")
        (folder / "backend.py").write_text(BUILD_BACKEND)
        wheel(folder, "tiny", "1.0")
        system = 'requires = []\nbuild-backend = "backend"\nbackend-path = ["."]'
        (folder / "pyproject.toml").write_text(f'[build-system]\n{system}\n[project]\nname = "tiny"\nversion = "1.0"\n')
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_", "MAKE", "MFLAGS"))
        }
        for name in ("PYTHON", "TORCH", "TORCH_INDEX"):
            self.environment.pop(name, None)
        self.environment["PIP_CONFIG_FILE"] = os.devnull
        self.environment["PATH"] = f"{folder / 'programs'}:/usr/local/bin:/usr/bin:/bin"

    def program(self, name: str, script: str) -> None:
        """Put a program first on PATH."""
        file = self.folder / "programs" / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def python(self, name: str, version: tuple[int, int], but: str = "") -> None:
        """An interpreter that says it has this version; told to install, it says so instead."""
        pretend = f"import sys; sys.version_info = {(*version, 1)}; {but}"
        self.program(
            name, f'[ "$1" = -c ] && exec {sys.executable} -c "{pretend}\n$2"\necho {name} is told: "$@"; exit 0'
        )

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--no-print-directory", STAMP, *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def installed(self) -> dict[str, str]:
        names = (self.folder / ".venv").glob("lib/python*/site-packages/*.dist-info")
        return dict(name.name.removesuffix(".dist-info").split("-", 1) for name in names)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "checkout")


NO_VENV = "sys.modules['ensurepip'] = None"


def test_the_newest_python_that_runs_is_taken(project: Project) -> None:
    project.program("python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    project.python("python3.12", (3, 12), but=NO_VENV)
    project.python("python3.11", (3, 11))
    project.python("python3", (3, 13))
    assert "python3.11 is told: -I infra/install.py .venv --torch= " in project.make().stdout
    project.python("python3.12", (3, 12))
    assert "python3.12 is told:" in project.make("TORCH=default").stdout
    (project.folder / ".venv/bin").mkdir(parents=True)
    (project.folder / ".venv/bin/python").symlink_to(project.folder / "programs/python3.11")
    assert "python3.11 is told:" in project.make().stdout, "what is installed stays"
    assert "python3.12 is told:" in project.make("PYTHON=python3.12").stdout, "unless another is named"


@pytest.mark.parametrize(("version", "but"), [((3, 10), ""), ((3, 14), ""), ((3, 12), NO_VENV)])
def test_a_python_that_cannot_be_used_is_refused(project: Project, version: tuple[int, int], but: str) -> None:
    project.python("mine", version, but)
    project.python("python3.12", (3, 12))
    done = project.make("PYTHON=mine")
    assert done.returncode == 2 and not done.stdout
    assert "gyre needs Python 3.11, 3.12 or 3.13 with venv and ensurepip, which is none of: mine." in done.stderr
    assert "make PYTHON=" in done.stderr


def test_without_a_python_root_gets_one_and_others_are_told(project: Project) -> None:
    for name in ("python3.13", "python3.12", "python3.11"):
        project.program(name, "exit 127")
    project.python("python3", (3, 10))
    project.program("id", "echo 1000")
    project.program("apt-get", f"echo apt-get $*; touch {project.folder}/asked")
    done = project.make()
    assert done.returncode == 2 and "python3 python3-venv" in done.stderr and not (project.folder / "asked").exists()
    project.program("id", "echo 0")
    done = project.make()
    assert done.returncode == 2 and "apt-get install -y -qq python3 python3-venv" in done.stdout
    project.python("newer", (3, 13))
    project.program("apt-get", f"mv {project.folder}/programs/newer {project.folder}/programs/python3")
    assert "newer is told: -I infra/install.py" in project.make().stdout


def test_the_build_of_torch(project: Project, indexes: tuple[Index, Index], tmp_path: Path) -> None:
    usual, cpu = indexes
    project.environment |= {"PIP_INDEX_URL": usual.url, "PIP_RETRIES": "0"}
    named = ["PYTHON=" + sys.executable, f"TORCH_INDEX={cpu.url}"]
    nowhere = ["PYTHON=" + sys.executable, "TORCH_INDEX=http://127.0.0.1:9"]

    done = project.make(*nowhere)
    assert done.returncode == 2 and "TORCH_INDEX=URL" in done.stderr and "TORCH=default" in done.stderr
    assert not (project.folder / STAMP).exists(), "half an installation is none"

    wheel(tmp_path / "wheels", "torch", "1.0+cpu")
    project.environment["PIP_FIND_LINKS"] = str(tmp_path / "wheels")
    done = project.make(*nowhere)
    assert done.returncode == 0 and "127.0.0.1:9" not in done.stdout, done.stderr
    assert project.installed()["torch"] == "1.0+cpu"

    (project.folder / STAMP).unlink()
    (torch,) = (project.folder / ".venv").glob("lib/python*/site-packages/torch-*.dist-info")
    shutil.rmtree(torch)
    del project.environment["PIP_FIND_LINKS"]
    done = project.make(*named)
    assert done.returncode == 0, done.stderr
    assert project.installed() | {"torch": "1.0+cpu", "tiny": "1.0", "other": "1.0"} == project.installed()

    asked = usual.requests, cpu.requests
    for arguments in ([], named, ["TORCH=cpu"]):
        done = project.make(*arguments)
        assert done.returncode == 0 and "installing" not in done.stdout, done.stdout
    assert (usual.requests, cpu.requests) == asked, "what is installed is not asked for again"

    project.environment["PIP_FIND_LINKS"] = str(tmp_path / "wheels")
    done = project.make("TORCH=default")
    assert done.returncode == 0, done.stderr
    assert project.installed()["torch"] == "1.0", "though pip prefers the CPU build of a version"
    assert project.installed()["tiny_cuda"] == "1.0" and cpu.requests == asked[1]


def test_only_known_builds(project: Project) -> None:
    done = project.make("PYTHON=" + sys.executable, "TORCH=rocm")
    assert done.returncode == 2 and "choose from" in done.stderr


@pytest.fixture
def commands(project: Project, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the installer would run in the tiny project."""
    said: list[str] = []

    def run(command: list[str], *, quiet: bool = False) -> subprocess.CompletedProcess[str]:
        said.append(" ".join(command).replace(str(project.folder), "HERE"))
        return subprocess.CompletedProcess(command, 0)

    (project.folder / ".venv").mkdir()
    monkeypatch.chdir(project.folder)
    monkeypatch.setattr(install, "ROOT", project.folder)
    monkeypatch.setattr(install, "run", run)
    monkeypatch.setattr(sys, "argv", ["install.py", ".venv", "--torch-index=none"])
    return said


@pytest.mark.parametrize("other", [["/elsewhere", *sys.version_info[:2]], [sys.base_prefix, 3, 10], None])
def test_another_python_makes_it_anew(
    commands: list[str], monkeypatch: pytest.MonkeyPatch, project: Project, other: list[str | int] | None
) -> None:
    (project.folder / STAMP).touch()
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    monkeypatch.setattr(install, "environment", lambda folder: other and install.Environment(other, "1.0", True))
    install.main()
    assert "-m venv --clear HERE/.venv" in commands[0]
    assert ("torch===1.0" if other else "torch==1.0+cpu") in commands[1]


@pytest.mark.parametrize("pip", [True, False])
def test_uv_is_used_where_it_is(commands: list[str], monkeypatch: pytest.MonkeyPatch, pip: bool) -> None:
    found = install.Environment(install.interpreter(), None, pip)
    monkeypatch.setattr(install, "environment", lambda folder: found)
    monkeypatch.setattr(install.shutil, "which", lambda name: "uv")
    install.main()
    assert all(command.startswith("uv pip install --python HERE/.venv/bin/python --no-deps") for command in commands)
    Path(STAMP).unlink()
    commands.clear()
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    install.main()
    assert ("-m venv --clear" in commands[0]) is not pip, "an environment of uv's has no pip"


def test_uv_finds_what_pip_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/one /two")
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    assert install.run(["sh", "-c", "echo $UV_FIND_LINKS"], quiet=True).stdout == "/one,/two\n"
    monkeypatch.setenv("UV_FIND_LINKS", "/mine")
    assert install.run(["sh", "-c", "echo $UV_FIND_LINKS"], quiet=True).stdout == "/mine\n"


def locked(file: str) -> dict[str, Requirement]:
    pins = [Requirement(line) for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    names = {canonicalize_name(pin.name): pin for pin in pins}
    assert len(names) == len(pins)
    return names


@pytest.mark.parametrize("file", [install.LOCK, install.CUDA_LOCK])
def test_the_locks_pin_every_package_at_a_version_that_any_index_may_have(file: str) -> None:
    for pin in locked(file).values():
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)), pin


def test_the_lock_has_what_gyre_depends_on_for_every_python() -> None:
    pins = locked(install.LOCK)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for dependency in map(Requirement, project["dependencies"]):
        pin = pins[canonicalize_name(dependency.name)]
        (version,) = pin.specifier
        assert dependency.specifier.contains(version.version) and pin.marker is None, dependency
    assert project["requires-python"] == ">=3.11,<3.14"


def test_the_locks_share_no_package() -> None:
    assert not locked(install.LOCK).keys() & locked(install.CUDA_LOCK).keys()
