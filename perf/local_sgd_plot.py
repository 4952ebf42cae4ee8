"""The figure of ``bench_local_sgd.py``: loss against time, a panel for every world."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#000000")
"""Colours that colour-blind readers can distinguish."""
PANEL_INCHES = (4.8, 3.4)
LEGEND_INCHES = 0.9


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw all worlds into a PNG, each test of the loss as a point."""
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(results), height + LEGEND_INCHES), dpi=150)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    (panels,) = figure.subplots(1, len(results), squeeze=False, sharey=True)
    for axes, result in zip(panels, results, strict=True):
        axes.axhline(result["target"], color="#999999", linewidth=2, alpha=0.6)
        for (name, figures), color in zip(result["ways"].items(), COLORS, strict=False):
            looks = figures["looks"]
            times = list(accumulate(look.get("seconds", 0.0) for look in looks))
            losses = [look["loss"] for look in looks]
            axes.plot(times, losses, label=name, color=color, marker="o", markersize=3.5)
        axes.set_title(result["world"], fontsize=9)
        axes.set_xlabel("seconds of training")
        axes.grid(alpha=0.35)
    panels[0].set_ylabel("loss of the test, after whole rounds")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path)
