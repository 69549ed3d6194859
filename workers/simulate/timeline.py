"""What every cell did, as a PNG: one row of cells for each policy, over the same axis of time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from workflows.simulation.run import Simulated

COLOURS: Final = {"serve": "#7fa8c9", "train": "#2f4b26", "wait": "#e8c547", "switch": "#c1443c", "away": "#dddddd"}
MEANING: Final = {
    "serve": "serves",
    "train": "trains",
    "wait": "waits for training work",
    "switch": "changes role",
    "away": "is away",
}


def draw_timeline(runs: Mapping[str, Simulated], path: Path, *, steps: int, title: str) -> None:
    """Write the first ``steps`` steps of each run, which must have been simulated with their timeline."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    until = max(run.closed_s[min(steps, len(run.closed_s)) - 1] for run in runs.values())
    unit, scale = ("h", 3600.0) if until > 7200 else ("min", 60.0) if until > 300 else ("s", 1.0)
    rows = max(run.cells for run in runs.values())
    height = 0.9 + len(runs) * max(0.8, 0.16 * rows)
    figure, every = plt.subplots(len(runs), 1, figsize=(11, height), dpi=120, sharex=True, squeeze=False)
    for axes, (name, run) in zip(every[:, 0], runs.items(), strict=True):
        for cell in range(run.cells):
            of_cell = [s for s in run.segments if s.cell == cell and s.start < until]
            axes.broken_barh(
                [(s.start / scale, (min(s.end, until) - s.start) / scale) for s in of_cell],
                (cell - 0.45, 0.9),
                facecolors=[COLOURS[s.what] for s in of_cell],
            )
        for closed in run.closed_s:
            if closed <= until:
                axes.axvline(closed / scale, color="black", linewidth=0.8)
        axes.set(ylabel=f"{name}\ncells", ylim=(run.cells - 0.5, -0.5), xlim=(0, until / scale), yticks=[])
    every[-1, 0].set_xlabel(f"time ({unit}); a black line: a step is closed")
    figure.suptitle(title, x=0.02, ha="left", fontsize=10)
    figure.legend(
        handles=[Patch(color=COLOURS[what], label=MEANING[what]) for what in COLOURS],
        loc="upper right",
        ncols=5,
        fontsize=7,
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
