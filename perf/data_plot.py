"""The figure of ``bench_data.py``: a panel for each kind, batch and cache, a bar per method."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

OURS, OTHERS = "#4477aa", "#bbbbbb"
BAR_INCHES = 0.3
PANEL_WIDTH_INCHES = 5.0
FIGURES = {"warm": "MB/cpu-s", "cold": "MB/s"}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the rates of all methods into a PNG: MB per cpu-second warm, MB per second cold."""
    panels: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if not isinstance(row["MB/s"], str):
            panels.setdefault((row["sample"], row["cache"], row["batch"]), []).append(row)
    num_bars = max(len(panel) for panel in panels.values())
    num_lines = -(-len(panels) // 2)
    size = (2 * PANEL_WIDTH_INCHES, num_lines * (num_bars * BAR_INCHES + 1))
    figure = Figure(figsize=size, dpi=150)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    grid = list(figure.subplots(num_lines, 2, squeeze=False).flat)
    for axes, ((sample, cache, batch), panel) in zip(grid, panels.items(), strict=False):
        rates = [row[FIGURES[cache]] for row in panel]
        names = [row["way"] for row in panel]
        colors = [OURS if name.startswith("hpctrain") else OTHERS for name in names]
        bars = axes.barh(names, rates, color=colors)
        axes.bar_label(bars, [f"{rate:,}" for rate in rates], padding=3, fontsize=8)
        axes.set_ylim(num_bars - 0.4, -0.6)  # from the top, bars of equal height in all panels
        axes.margins(x=0.24)
        axes.set_title(f"{cache}, {sample}, batches of {batch}", fontsize=9)
        axes.set_xlabel(FIGURES[cache], fontsize=8)
        axes.tick_params(labelsize=8)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.savefig(path)
