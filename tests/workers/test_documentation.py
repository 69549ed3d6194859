"""The documents say what is there: commands, make targets, the example configuration, names of files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import typer.main

from infra.settings import Settings
from workers.cli import app
from workflows.contracts.configuration import RunConfig

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "docs/architecture.md", "docs/simulator.md"]


def commands() -> set[str]:
    group = typer.main.get_command(app)
    names = set()
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        names.add(name)
        names |= {f"{name} {sub}" for sub in getattr(command, "commands", {})}
    return names


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_in_the_documents_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    used = set(re.findall(r"`gyre ([a-z]+(?: (?:run|step)\b)?)", text))
    known = commands()
    assert used and not {name for name in used if name not in known and name.split()[0] not in known}
    for module in re.findall(r"python -m ([a-z_.]+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    groups = {name.split()[0] for name in commands() if " " in name}
    missing = [name for name in commands() if name not in groups and f"gyre {name}" not in text]
    assert not missing


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^    make ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_example_configuration_is_one() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert RunConfig.model_validate(tomllib.loads(example)).name == "my-run"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_settings_that_are_named_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for file in re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|md))`", text):
        assert (ROOT / file).exists(), file
    for name in re.findall(r"`GYRE_([A-Z_]+)`", text):
        assert name.lower() in Settings.model_fields, name


def test_the_documents_name_the_debian_packages_that_make_installs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (packages,) = re.findall(r"^DEBIAN := (.*)$", makefile, re.M)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert packages in readme
