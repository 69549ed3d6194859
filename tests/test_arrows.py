"""The map holds: imports run one way between packages and inside them, in no circle, and pure code stays pure.

Every import counts, one within a function or for the type checker alone as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("trajectory", "infra", "proxy", "workflows", "activities", "workers")

ALLOWED = {
    "trajectory": {"trajectory"},
    "infra": {"infra", "trajectory", "workflows.contracts"},
    "proxy": {"proxy", "infra", "trajectory", "workflows.contracts"},
    "workflows": {"workflows", "trajectory.config", "trajectory.plugins"},
    "activities": {"activities", "infra", "trajectory", "workflows"},
    "workers": set(PACKAGES),
    # inside a package
    "trajectory.config": {"trajectory.config", "trajectory.plugins"},
    "trajectory.plugins": {"trajectory.plugins"},
    "workflows.contracts": {"workflows.contracts", "trajectory.config", "trajectory.plugins"},
    "workflows.scheduling": {"workflows.scheduling", "workflows.contracts", "trajectory.plugins"},
    "workflows.simulation": {"workflows.simulation", "workflows.scheduling", "workflows.contracts"},
    "proxy.errors": {"proxy.errors"},
    "proxy.limits": {"proxy.limits", "infra"},
    "proxy.auth": {"proxy.auth", "proxy.errors", "proxy.limits", "infra"},
    "proxy.conversation": {"proxy.conversation", "proxy.errors", "proxy.limits", "infra", "trajectory"},
    "proxy.dialects": {"proxy.dialects", "proxy.conversation", "proxy.errors", "proxy.limits", "infra"},
    "proxy.routing": {"proxy.routing", "proxy.conversation", "proxy.errors", "proxy.limits", "infra", "trajectory"},
    "proxy.calls": {"proxy.calls", "proxy.routing", "proxy.conversation", "proxy.auth", "proxy.errors", "proxy.limits",
                    "infra", "trajectory"},
}  # fmt: skip
"""A package, or a room or module of one -> what its modules may import of gyre; the narrowest entry counts."""

TOP = {"workflows.run", "workflows.step", "workflows.step_training", "workflows.group", "workflows.scheduler",
       "workflows.cell", "workflows.activity_calls"}  # fmt: skip
"""Workflow code: it may be imported by those who start or serve it, not by what it is made of."""

EFFECTS = {
    *("torch", "numpy", "redis", "aiohttp", "httpx", "fastapi", "uvicorn", "megatron", "sglang", "mooncake", "fsspec"),
    *("transformers", "tokenizers", "psutil", "os", "pathlib", "socket", "subprocess", "time", "threading"),
}
PURE = ("workflows", "trajectory.config", "trajectory.plugins")
"""What may have no effects, nor import anything that has: a workflow's code is replayed from its history."""
PYDANTIC_ONLY = ("workflows.contracts", "trajectory.config")
"""Plain data that every package may import, so it brings nothing along."""


@cache
def modules() -> Mapping[str, Path]:
    """Dotted name -> file of every module that is part of the product."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in sorted(files)
    }


def imports(source: str, known: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all imports; of ``from package import module`` the module, where it is one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "imports are absolute"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield node.lineno, name if name in known else node.module


@cache
def arrows(module: str) -> tuple[tuple[int, str], ...]:
    return tuple(imports(modules()[module].read_text(encoding="utf-8"), modules()))


def within(name: str, rooms: set[str] | tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def rule_of(module: str) -> set[str]:
    """What the narrowest entry of ALLOWED says."""
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next(ALLOWED[name] for name in names if name in ALLOWED)


def forbidden(module: str, found: tuple[tuple[int, str], ...]) -> list[str]:
    return [
        f"{module}, line {line}: {name}"
        for line, name in found
        if within(name, PACKAGES) and not within(name, rule_of(module))
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_the_way_the_map_allows(package: str) -> None:
    mine = [module for module in modules() if within(module, (package,))]
    assert mine
    assert not [line for module in mine for line in forbidden(module, arrows(module))]


def test_every_room_of_the_rules_is_there() -> None:
    named = {name for rule in ALLOWED.items() for name in (rule[0], *rule[1])} | TOP
    missing = {name for name in named if not any(within(module, (name,)) for module in modules())}
    assert not missing


def test_a_workflow_is_not_imported_by_its_parts() -> None:
    for room in ("workflows.contracts", "workflows.scheduling", "workflows.simulation", "workflows.names"):
        for module in modules():
            if within(module, (room,)):
                assert not [name for _, name in arrows(module) if within(name, tuple(TOP))], module


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: {name for _, name in arrows(module) if name in modules() and name != module} for module in modules()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_no_rooms_import_each_other_in_a_circle() -> None:
    """Rooms are folders inside a package; a module beside them is a room of its own."""

    def room(module: str) -> str:
        folder = ".".join(modules()[module].parent.relative_to(ROOT).parts)
        return module if folder in PACKAGES or not within(module, (folder,)) else folder

    graph: dict[str, set[str]] = {}
    for module in modules():
        others = {room(name) for _, name in arrows(module) if name in modules()} - {room(module)}
        graph.setdefault(room(module), set()).update(others)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def reached(module: str) -> set[str]:
    """The module and everything of gyre that importing it imports."""
    seen, open_ends = set[str](), [module]
    while open_ends:
        module = open_ends.pop()
        if module in modules() and module not in seen:
            seen.add(module)
            open_ends += [name for _, name in arrows(module)]
    return seen


def test_workflow_code_and_what_it_imports_is_free_of_effects() -> None:
    pure = {other for module in modules() if within(module, PURE) for other in reached(module)}
    wrong = [
        f"{module}, line {line}: {name}"
        for module in sorted(pure)
        for line, name in arrows(module)
        if name.split(".")[0] in EFFECTS
    ]
    assert pure and not wrong


def test_contracts_are_plain_data() -> None:
    plain = {*sys.stdlib_module_names, "pydantic", *PACKAGES}
    wrong = [
        f"{module}, line {line}: {name}"
        for module in modules()
        if within(module, PYDANTIC_ONLY)
        for line, name in arrows(module)
        if name.split(".")[0] not in plain
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("infra.state.keys", "from workflows.contracts.orders import Order", False),
        ("infra.state.keys", "from workflows import names", True),
        ("infra.state.keys", "def later():\n    import workflows.step", True),
        ("proxy.routing.router", "from proxy.conversation import ledger", False),
        ("proxy.conversation.ledger", "from proxy.routing import router", True),
        ("proxy.dialects.anthropic", "from proxy.calls.gateway import Gateway", True),
        ("proxy.app", "from proxy.calls.gateway import Gateway", False),
        ("workflows.contracts.orders", "from workflows import names", True),
        ("workflows.contracts.orders", "from trajectory.config import LossConfig", False),
        ("workflows.step", "from trajectory import loss", True),
        ("trajectory.tree", "if TYPE_CHECKING:\n    from infra.state import keys", True),
    ],
)
def test_an_arrow_that_runs_back_is_seen(module: str, source: str, wrong: bool) -> None:
    known = {**modules(), "proxy.conversation.ledger": ROOT, "proxy.routing.router": ROOT}
    assert bool(forbidden(module, tuple(imports(source, known)))) == wrong
