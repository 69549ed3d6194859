"""`gyre harness`: which harnesses there are, installing one, and checking one for real.

A check runs the installed harness, unmodified, in its sandbox, against the real gateway and a scripted policy, and
says what held and what didn't. It touches nothing of a running stack.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from infra.harness.harness import HarnessUnavailable
from infra.harness.install import PACKAGES, InstallFailed, install
from infra.harness.mini_adapter import Mini
from infra.harness.registry import harness_named, known
from infra.settings import Settings
from workers.errors import UsageError
from workers.harness_check.catalogue import scenarios_of
from workers.harness_check.scenarios import Report, private_gateway, run_scenario
from workers.harness_check.tools import TOOLS


async def check(name: str, scenarios: list[str], folder: Path, turns: int = 16) -> list[Report]:
    """Run the scenarios (if none is named, all that the harness has but those that take minutes). Raises UsageError."""
    try:
        harness = harness_named(name, folder) if name != Mini.name else Mini(max_turns=4 * turns)
        harness.check()
    except HarnessUnavailable as error:
        raise UsageError(str(error)) from error
    if name not in TOOLS:
        raise UsageError(f"{name}: gyre doesn't know its tools, which the scripted policy would have to call")
    possible = scenarios_of(name, turns)
    if unknown := [scenario for scenario in scenarios if scenario not in possible]:
        raise UsageError(f"{name} has no scenario {unknown[0]!r}; there are {', '.join(possible)}")
    wanted = scenarios or [scenario for scenario in possible if not possible[scenario].hold_s]
    async with private_gateway() as private:
        return [await run_scenario(private, harness, possible[scenario]) for scenario in wanted]


def as_json(report: Report) -> dict[str, Any]:
    return {**asdict(report), "ok": report.ok}


def show_report(console: Console, report: Report) -> None:
    version = f" {report.version}" if report.version else ""
    console.print(f"{report.harness}{version}, {report.scenario}: {report.calls} calls in {report.seconds} s")
    for finding in report.findings:
        mark = "[green]held[/]" if finding.ok else "[red]FAILED[/]"
        console.print(f"  {mark} {finding.what}", end="")
        console.print(f": {finding.detail}" if finding.detail else "", markup=False, highlight=False)
    console.print("  " + ", ".join(f"{count} {name}" for name, count in report.counts.items()), highlight=False)


def listed(settings: Settings) -> list[dict[str, str]]:
    """Every harness that there is, its version, the package that brings it, and what is missing for it here. Raises
    UsageError."""
    try:
        packages = known()
    except HarnessUnavailable as error:
        raise UsageError(str(error)) from error
    rows = []
    for name, package in packages.items():
        version = missing = ""
        try:
            harness = harness_named(name, settings.harnesses)
            version = harness.version
            harness.check()
        except HarnessUnavailable as error:
            missing = str(error)
        rows.append({"name": name, "version": version, "package": package, "missing": missing})
    return rows


def install_harness(name: str, settings: Settings) -> Path:
    """Install the pinned version; returns its folder. Raises UsageError."""
    if name not in PACKAGES:
        raise UsageError(f"{name!r} is nothing to install; there are {', '.join(sorted(PACKAGES))}")
    folder = (settings.harnesses / name).absolute()
    try:
        install(name, folder)
    except (InstallFailed, HarnessUnavailable, OSError) as error:
        raise UsageError(str(error)) from error
    return folder
