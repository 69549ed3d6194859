"""Comparisons as tables for a terminal."""

from __future__ import annotations

from typing import Any, Final

COLUMNS: Final = "{:<26}{:>10}{:>10}{:>13}{:>13}{:>16}{:>15}{:>16}"


def lines_of(comparison: dict[str, Any]) -> list[str]:
    """A comparison (`Comparison.as_json`) as a table."""
    head = f"max_staleness {comparison['max_staleness']}, {comparison['steps']} steps, {comparison['cells']} cells"
    batchwise = {f"{name}, batchwise": row for name, row in comparison["batchwise"].items()}
    rows = {**batchwise, **comparison["policies"], "clairvoyant": comparison["clairvoyant"]}
    idle = "idle_gpu_hours" if "idle_gpu_hours" in comparison["clairvoyant"] else "idle_cell_hours"
    names = ("policy", "s / step", "vs async", "vs colocate", "utilisation", idle.replace("_", " "))
    lines = [COLUMNS.format(*names, "switches/step", "of clairvoyant")]
    for name, row in rows.items():
        speedups = [f"{row['speedup'][over]:.2f}×" if over in row["speedup"] else "" for over in ("async", "colocate")]
        lines.append(
            COLUMNS.format(
                f"{name} ({row['training_cells']} train)" if "training_cells" in row else name,
                f"{row['step_s']:.1f}",
                *speedups,
                f"{row['utilisation']:.1%}",
                f"{row[idle]:.1f}",
                f"{row['switches_per_step']:.1f}",
                f"{comparison['clairvoyant']['step_s'] / row['step_s']:.1%}",
            )
        )
    bound = comparison["lower_bound"]
    reached = comparison["clairvoyant"]["step_s"] / bound["step_s"]
    lines.append(COLUMNS.format("lower bound", f"{bound['step_s']:.1f}", "", "", "", "", "", f"{reached:.1%}"))
    if comparison["at_most"]:
        most = ", ".join(f"{value:.2f}× {name}" for name, value in comparison["at_most"].items())
        lines.append(f"no schedule of this work is faster than {most}")
    return [head, *(f"  {line}" for line in lines)]
