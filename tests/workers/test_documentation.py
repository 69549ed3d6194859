"""The documents say what is there: commands, make targets, the example configuration, names of files, decisions."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer.main
import yaml

from infra.harness.install import PACKAGES
from infra.settings import Settings
from workers.cli import app
from workflows.contracts.configuration import RunConfig

ROOT = Path(__file__).parents[2]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/simulator.md",
    *(str(page.relative_to(ROOT)) for page in DECISIONS),
    "examples/run.toml",
    "examples/plugin/pyproject.toml",
]
each_document = pytest.mark.parametrize("document", DOCUMENTS)


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def commands() -> set[str]:
    group = typer.main.get_command(app)
    names = set()
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        names.add(name)
        names |= {f"{name} {sub}" for sub in getattr(command, "commands", {})}
    return names


@each_document
def test_every_command_in_the_documents_exists(document: str) -> None:
    known = commands()
    groups = {name.split()[0] for name in known if " " in name}
    for name, sub in re.findall(r"(?:`|bin/)gyre ([a-z]+)(?: ([a-z]+)\b)?", text_of(document)):
        assert (f"{name} {sub}" if name in groups and sub else name) in known, f"gyre {name} {sub}"


@each_document
def test_every_module_that_is_run_exists(document: str) -> None:
    for module in re.findall(r"python -m ([a-z_.]+)", text_of(document)):
        path = ROOT / module.replace(".", "/")
        there = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        assert there or module == "pytest", module


def test_every_command_is_in_the_readme() -> None:
    text = text_of("README.md")
    groups = {name.split()[0] for name in commands() if " " in name}
    missing = [name for name in commands() if name not in groups and f"gyre {name}" not in text]
    assert not missing


@each_document
def test_the_make_targets_in_the_documents_exist(document: str) -> None:
    makefile = text_of("Makefile")
    for target in re.findall(r"(?:^    |^#     |`)make ([a-z-]+)", text_of(document), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_make_installs_every_harness_that_is_pinned() -> None:
    done = subprocess.run(["make", "-pnq", "clean"], cwd=ROOT, capture_output=True, text=True, check=False)
    (names,) = re.findall(r"^HARNESSES := (.*)$", done.stdout, re.M)
    assert sorted(names.split()) == sorted(PACKAGES)


def test_the_example_configuration_is_one() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", text_of("README.md"), re.S)
    assert RunConfig.model_validate(tomllib.loads(example)).name == "my-run"


@each_document
def test_files_and_settings_that_are_named_exist(document: str) -> None:
    text = text_of(document)
    for file in re.findall(r"`([a-z_.-]+/[a-z_/.-]*)`", text):
        assert (ROOT / file).exists(), file
    for file in re.findall(r"`([a-z_]+\.(?:py|toml))`", text):
        folders = {(ROOT / named).parent for named in re.findall(r"`([a-z_.-]+/[a-z_/.-]*)`", text)}
        assert any((folder / file).exists() for folder in folders), file
    for link in re.findall(r"\]\(([^):]+)\)", text):
        assert ((ROOT / document).parent / link).exists(), link
    for name in re.findall(r"`GYRE_([A-Z_]+)`", text):
        assert name.lower() in Settings.model_fields, name


def test_the_documents_name_the_debian_packages_that_make_installs() -> None:
    (packages,) = re.findall(r"^DEBIAN := (.*)$", text_of("Makefile"), re.M)
    assert packages in " ".join(text_of("README.md").split())


def test_decisions_are_numbered_and_every_page_is_in_the_list() -> None:
    index = text_of("docs/decisions/README.md")
    seen = 0
    for page, first, last in re.findall(r"\]\(([a-z]+\.md)\) \| (\d+)–(\d+):", index):
        paragraphs = text_of(f"docs/decisions/{page}").split("\n\n")[1:]
        numbers = [int(number) for number in re.findall(r"^\*\*(\d+)\. ", "\n".join(paragraphs), re.M)]
        assert len(numbers) == len(paragraphs) and numbers == list(range(int(first), int(last) + 1)), page
        assert numbers[0] == seen + 1
        seen = numbers[-1]
    assert {page.name for page in DECISIONS} == {"README.md", *re.findall(r"\]\(([a-z]+\.md)\) \|", index)}


def test_a_recipe_touches_three_files_at_most() -> None:
    _, recipes = text_of("CONTRIBUTING.md").split("## Recipes")
    titles = re.findall(r"^\*\*(.*?)\*\*", recipes, re.M)
    for part in ("A harness.", "A loss.", "A scheduling policy.", "A dialect.", "An activity."):
        assert part in titles
    steps = [len(re.findall(r"^\d\. `", recipe, re.M)) for recipe in re.split(r"^\*\*", recipes, flags=re.M)[1:]]
    assert all(1 <= count <= 3 for count in steps), steps


def test_pre_commit_is_make_check() -> None:
    (repository,) = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"]
    (hook,) = repository["hooks"]
    assert repository["repo"] == "local" and hook["entry"].split()[0] == "make" and hook["entry"].split()[-1] == "check"
    assert hook["always_run"] and not hook["pass_filenames"]
