"""A room can be seen at a glance and a word means one thing: sizes of files and folders, names of classes."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("trajectory", "infra", "proxy", "workflows", "activities", "workers")

LINES = 450
"""Of a file at most."""
FILES = 13
"""Of a folder at most, without ``__init__.py``."""
LARGER = {"trajectory": "its list of files reads like the algorithm"}
"""Folder that may hold more, and why."""
SHARED: dict[str, str] = {}
"""Name that two classes may have, and why."""


def product() -> list[Path]:
    return sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def test_files_stay_readable() -> None:
    lengths = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in product()}
    assert not {name: lines for name, lines in lengths.items() if lines > LINES}


def test_a_folder_is_seen_at_a_glance() -> None:
    counts = Counter(str(file.parent.relative_to(ROOT)) for file in product() if file.name != "__init__.py")
    assert not {folder: files for folder, files in counts.items() if files > FILES and folder not in LARGER}


def test_a_class_name_stands_for_one_thing() -> None:
    where = defaultdict(list)
    for file in product():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    twice = {name: places for name, places in where.items() if len(places) > 1}
    unexplained = [f"{name}: {', '.join(places)}" for name, places in twice.items() if name not in SHARED]
    assert not unexplained, "classes of one name:\n" + "\n".join(unexplained)
    assert set(SHARED) <= set(twice), "a name that is shared no longer needs no reason"
