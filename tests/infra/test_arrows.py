"""The map holds: imports between rooms run one way, and workflow code stays free of effects."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "trajectory": set[str](),
    "infra": {"trajectory"},
    "proxy": {"infra", "trajectory"},
    "workflows": set[str](),
    "activities": {"infra", "trajectory", "workflows"},
    "workers": {"activities", "infra", "proxy", "trajectory", "workflows"},
}
EFFECTS = {"torch", "numpy", "redis", "aiohttp", "httpx", "fastapi", "megatron", "sglang", "mooncake", "fsspec", "os"}


def imported(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.lineno, node.module.split(".")[0]))
    return found


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_the_map_allows(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in imported(file)
        if (name in ALLOWED and name != room and name not in ALLOWED[room]) or (room == "workflows" and name in EFFECTS)
    ]
    assert not wrong


def test_files_stay_readable() -> None:
    long = {
        str(file.relative_to(ROOT)): count
        for room in ALLOWED
        for file in (ROOT / room).rglob("*.py")
        if (count := len(file.read_text(encoding="utf-8").splitlines())) > 450
    }
    assert not long
