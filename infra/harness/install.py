"""Installs harnesses that are packages: ``python -m infra.harness.install claude-code [--into FOLDER]``.

Each gets a folder of its own, pinned, so that its dependencies never meet gyre's: a virtual environment for a Python
package, a ``node_modules`` for an npm one. Of a harness that is a native binary the package for this machine alone is
installed, without the launcher that would choose it. No package's own scripts are run.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Final, Literal

from infra.harness.harness import HarnessUnavailable, Session

MACHINE: Final = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
CPU_INFO: Final = Path("/proc/cpuinfo")


class InstallFailed(RuntimeError):
    """pip or npm could not install the harness."""


@dataclass(frozen=True)
class Package:
    """Where a harness comes from, pinned."""

    harness: str
    manager: Literal["pip", "npm"]
    name: str
    version: str
    main: str
    """The program (or script) in the package, relative to the installed package; for pip to the environment."""
    tag: str = ""
    """What the package's own version has after ``version``: some publish one package per machine under one name."""

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}" if self.manager == "pip" else f"{self.name}@{self.version}{self.tag}"

    def program(self, folder: Path) -> Path:
        """The program (or script) in an installation."""
        return folder / self.main if self.manager == "pip" else folder / "node_modules" / self.name / self.main

    def installed_version(self, folder: Path) -> str | None:
        """The version that is there, None for none. Starts no process."""
        if self.manager == "pip":
            places = [str(place) for place in folder.glob("lib/python3*/site-packages")]
            return next((package.version for package in distributions(name=self.name, path=places)), None)
        file = folder / "node_modules" / self.name / "package.json"
        if not file.is_file():
            return None
        return str(json.loads(file.read_text(encoding="utf-8"))["version"]).removesuffix(self.tag)


def _baseline() -> str:
    """opencode's binaries for machines without AVX2 have a package of their own."""
    avx2 = MACHINE != "x64" or (CPU_INFO.exists() and " avx2" in CPU_INFO.read_text(encoding="utf-8"))
    return "" if avx2 else "-baseline"


_TRIPLE: Final = f"{platform.machine()}-unknown-linux-musl"
PACKAGES: Final = {
    package.harness: package
    for package in (
        Package("mini-swe-agent", "pip", "mini-swe-agent", "2.4.6", "bin/python"),
        Package("claude-code", "npm", f"@anthropic-ai/claude-code-linux-{MACHINE}", "2.1.220", "claude"),
        Package("codex", "npm", "@openai/codex", "0.171.0", f"vendor/{_TRIPLE}/bin/codex", tag=f"-linux-{MACHINE}"),
        Package("qwen-code", "npm", "@qwen-code/qwen-code", "0.15.10", "cli.js"),
        Package("opencode", "npm", f"opencode-linux-{MACHINE}{_baseline()}", "1.18.33", "bin/opencode"),
    )
}


class PackagedHarness:
    """What harnesses that are packages have in common, unless they say otherwise. ``folder``: the installation."""

    package: Package
    address_space_mb: int | None = None
    patience_s = 3600.0
    early_stream = True
    disallowed_tools: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    @property
    def name(self) -> str:
        return self.package.harness

    @property
    def version(self) -> str:
        return self.package.version

    def files(self, session: Session) -> dict[str, str]:
        return {}

    def check(self) -> None:
        require(self.package, self.folder)


def install(harness: str, into: Path) -> None:
    """Install, or complete, the harness in the folder ``into``. Raises InstallFailed and KeyError."""
    package = PACKAGES[harness]
    if package.manager == "pip":
        venv.create(into, with_pip=True, symlinks=True)
        command = [str(into / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise InstallFailed("npm is missing: install nodejs (20 or newer) and npm")
        into.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--prefix", str(into), "--ignore-scripts", "--no-audit", "--no-fund"]
        command += ["--loglevel=error", "--no-update-notifier"]
    done = subprocess.run([*command, package.requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallFailed(
            f"{package.manager} install {package.requirement} into {into}: {done.stderr.strip()[-2000:]}"
        )
    require(package, into)


def require(package: Package, folder: Path) -> None:
    """Raises HarnessUnavailable when the pinned version isn't installed in ``folder``."""
    mend = f"make .gyre-harness/{package.harness}/.installed, or "
    mend += f"python -m infra.harness.install {package.harness} --into {folder}"
    version = package.installed_version(folder)
    if version is None or not package.program(folder).exists():
        raise HarnessUnavailable(f"{package.harness} is not installed in {folder}: {mend}")
    if version != package.version:
        raise HarnessUnavailable(f"{package.harness} in {folder} is {version}, gyre knows {package.version}: {mend}")


def interpreter_prefix(folder: Path) -> Path:
    """Installation of the interpreter that a virtual environment stands on (``/usr``, or a pyenv version)."""
    return (folder / "bin" / "python").resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description="Install a harness into a folder of its own.")
    parser.add_argument("name", choices=sorted(PACKAGES))
    parser.add_argument("--into", type=Path, help="its folder (.gyre-harness/NAME)")
    given = parser.parse_args()
    into: Path = (given.into or Path(".gyre-harness") / given.name).absolute()
    try:
        install(given.name, into)
    except (InstallFailed, HarnessUnavailable, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    print(f"{PACKAGES[given.name].requirement} is in {into}")


if __name__ == "__main__":
    main()
