"""Makes gyre's virtual environment: ``make`` runs this file with the Python that is to be in it.

It runs before anything is installed, so it needs nothing but the standard library. It is a module of ``infra``, not a
recipe, so that it is checked and tested as the rest is.

torch comes first and by itself: its CPU build has a name of its own (``+cpu``), which PyPI does not carry, and its
ordinary build brings CUDA's libraries. Whichever it is satisfies the lock's ``torch==``, so the lock is one for both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn

Build = Literal["cpu", "default"]
ROOT: Final = Path(__file__).parents[1]
LOCK: Final = "requirements.lock"
CUDA_LOCK: Final = "requirements-cuda.lock"
SOURCES: Final = (LOCK, CUDA_LOCK, "pyproject.toml", "infra/install.py")
PROBE: Final = """
import importlib.metadata, importlib.util, json, sys
try:
    torch = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    torch = None
print(json.dumps([[sys.base_prefix, *sys.version_info[:2]], torch, importlib.util.find_spec("pip") is not None]))
"""


@dataclass(frozen=True)
class Environment:
    """What a virtual environment has."""

    interpreter: list[str | int]
    """The installation that it stands on, and its major and minor version."""
    torch: str | None
    pip: bool

    @property
    def build(self) -> Build | None:
        """Which build of torch is in it, None for none."""
        if self.torch is None:
            return None
        return "cpu" if self.torch.endswith("+cpu") else "default"


def environment(folder: Path) -> Environment | None:
    """What is in the folder, None where its interpreter doesn't run (or was never made)."""
    try:
        done = subprocess.run([folder / "bin" / "python", "-I", "-c", PROBE], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return Environment(*json.loads(done.stdout))


def interpreter() -> list[str | int]:
    return [sys.base_prefix, *sys.version_info[:2]]


def run(command: list[str], *, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command; with ``quiet`` what it says is kept, not shown."""
    settings = dict(os.environ)
    for pip, uv in (("PIP_FIND_LINKS", "UV_FIND_LINKS"), ("PIP_INDEX_URL", "UV_DEFAULT_INDEX")):
        if pip in settings:  # uv reads nothing that was set for pip
            settings.setdefault(uv, ",".join(settings[pip].split()))
    return subprocess.run(command, capture_output=quiet, text=True, env=settings, check=False)


def installer(folder: Path, uv: str | None) -> list[str]:
    """The command that installs into the environment exactly what it is told, without what that depends on."""
    python = str(folder / "bin" / "python")
    if uv:
        return [uv, "pip", "install", "--python", python, "--no-deps"]
    return [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]


def install_torch(install: list[str], build: Build, index: str) -> None:
    """Install the build of torch that is asked for, at the lock's version."""
    (version,) = re.findall(r"^torch==(\S+)$", (ROOT / LOCK).read_text(encoding="utf-8"), re.M)
    if build == "default":  # three signs: no other build of this version will do
        print(f"gyre: torch {version} with CUDA's libraries: 2.5 GB to download", flush=True)
        demand([*install, f"torch==={version}", "-r", CUDA_LOCK])
        return
    install = [*install, "--quiet", f"torch=={version}+cpu"]
    if run(install, quiet=True).returncode == 0:
        return
    print(f"gyre: torch {version}+cpu is nowhere that is searched by default, so also in {index}", flush=True)
    if run([*install, "--extra-index-url", index]).returncode:
        stop(
            f"torch {version}+cpu could not be had: `make TORCH_INDEX=URL` names another index that has it, and "
            "`make TORCH=default` takes the ordinary build, larger, which runs on CPU as well"
        )


def demand(command: list[str]) -> None:
    """Run a command that has to succeed."""
    if code := run(command).returncode:
        stop(f"exit {code} from {' '.join(command)}")


def stop(why: str) -> NoReturn:
    print(f"gyre: {why}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make gyre's virtual environment, or bring it up to date.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", choices=["", "cpu", "default"], default="", help="its build; '' for what is there")
    parser.add_argument("--torch-index", required=True, help="has the CPU build where pip does not find it")
    given = parser.parse_args()
    os.chdir(ROOT)
    folder: Path = given.folder.absolute()
    stamp = folder / ".installed"
    uv = shutil.which("uv")
    found = environment(folder)
    build: Build = given.torch or (found and found.build) or "cpu"
    same = found is not None and found.interpreter == interpreter() and found.build in {None, build}
    changed = max((ROOT / source).stat().st_mtime for source in SOURCES)
    if same and stamp.exists() and stamp.stat().st_mtime >= changed:
        return
    stamp.unlink(missing_ok=True)
    how = "uv" if uv else "pip"
    print(f"gyre: installing for Python {sys.version.split()[0]}, torch's {build} build, with {how}", flush=True)
    if not same or not (uv or (found and found.pip)):
        base = sys._base_executable  # type: ignore[attr-defined]  # outlives the environment that this may run from
        make = [uv, "venv", "--quiet", "--python", base] if uv else [base, "-m", "venv"]
        demand([*make, "--clear", str(folder)])
    install = installer(folder, uv)
    install_torch(install, build, given.torch_index)
    demand([*install, "--quiet", "-r", LOCK])
    demand([*install, "--quiet", "--no-build-isolation", "-e", "."])
    stamp.touch()


if __name__ == "__main__":
    main()
