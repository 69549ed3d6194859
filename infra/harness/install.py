"""Installs harnesses that are packages: ``python -m infra.harness.install mini-swe-agent --into FOLDER``.

Each gets a virtual environment of its own, pinned, so that its dependencies never meet gyre's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

MINI_SWE_AGENT_VERSION: Final = "2.4.6"

PINNED: Final = {"mini-swe-agent": f"mini-swe-agent=={MINI_SWE_AGENT_VERSION}"}


class InstallFailed(RuntimeError):
    """pip could not install the harness."""


def install(name: str, into: Path) -> None:
    """Make (or complete) the virtual environment ``into`` with the harness. Raises InstallFailed and KeyError."""
    requirement = PINNED[name]
    venv.create(into, with_pip=True, symlinks=True)
    command = [str(into / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, requirement], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise InstallFailed(f"pip install {requirement} into {into}: {done.stderr.strip()[-2000:]}")


def installed_version(folder: Path, package: str) -> str | None:
    """Version of ``package`` in a virtual environment, None when it isn't there. Starts no process."""
    stem = package.replace("-", "_")
    for metadata in folder.glob(f"lib/python3*/site-packages/{stem}-*.dist-info/METADATA"):
        for line in metadata.read_text(encoding="utf-8").splitlines():
            if line.startswith("Version:"):
                return line.partition(":")[2].strip()
    return None


def interpreter_prefix(folder: Path) -> Path:
    """Installation of the interpreter that a virtual environment stands on (``/usr``, or a pyenv version)."""
    return (folder / "bin" / "python").resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description="Install a harness into a virtual environment of its own.")
    parser.add_argument("name", choices=sorted(PINNED))
    parser.add_argument("--into", type=Path, help="folder of the virtual environment (.gyre-harness/NAME)")
    given = parser.parse_args()
    into: Path = (given.into or Path(".gyre-harness") / given.name).absolute()
    try:
        install(given.name, into)
    except (InstallFailed, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    print(f"{PINNED[given.name]} is in {into}")


if __name__ == "__main__":
    main()
