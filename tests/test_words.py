"""A room can be seen at a glance: sizes of files."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("trajectory", "infra", "proxy", "workflows", "activities", "workers")

LINES = 450
"""Of a file at most."""


def product() -> list[Path]:
    return sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def test_files_stay_readable() -> None:
    lengths = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in product()}
    assert not {name: lines for name, lines in lengths.items() if lines > LINES}
