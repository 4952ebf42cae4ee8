"""The figure of ``bench_engines.py``: a column for each world, sums above, the step below."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from measure import median

from hpctrain.core.units import format_bytes

STYLES = {
    "hpctrain": ("#4477aa", "o", "-"),
    "Horovod": ("#ee6677", "^", "--"),
    "Horovod, cycle 0.1 ms": ("#aa3377", "v", "--"),
    "on Horovod, flat": ("#ccbb44", "s", ":"),
    "on Horovod, two-level": ("#228833", "D", ":"),
    "no communication": ("#bbbbbb", "", ""),
}
"""Colour, marker and line of each method; colour-blind readers can distinguish the colours."""
COLUMN_INCHES, SUMS_INCHES, STEP_INCHES, LEGEND_INCHES = 4.2, 3.2, 1.9, 0.7


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw all results into a PNG."""
    height = SUMS_INCHES + STEP_INCHES + LEGEND_INCHES
    figure = Figure(figsize=(COLUMN_INCHES * len(results), height), dpi=150)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    heights = (SUMS_INCHES, STEP_INCHES)
    grid = figure.subplots(2, len(results), squeeze=False, height_ratios=heights)
    for (above, below), result in zip(grid.T, results, strict=True):
        _sums(above, result["ways"])
        above.set_title(result["world"], fontsize=9)
        _steps(below, result["ways"])
    grid[0][0].set_ylabel("time of one all-reduce (ms)")
    lines: dict[str, Any] = {}  # of all columns: one node has no two levels
    for axes in grid[0]:
        handles, labels = axes.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    place = {"loc": "outside lower center", "ncols": min(len(lines), 2 * len(results)) or 1}
    figure.legend(lines.values(), lines.keys(), frameon=False, fontsize=9, **place)
    figure.savefig(path)


def _sums(axes: Any, methods: dict[str, Any]) -> None:
    sizes: list[int] = []
    for method, (color, marker, line) in STYLES.items():
        if sums := methods.get(method, {}).get("sums"):
            sizes = list(map(int, sums))  # keys of JSON are texts
            times = [median(seconds) * 1e3 for seconds in sums.values()]
            style = {"color": color, "marker": marker, "linestyle": line}
            axes.plot(sizes, times, label=method, markersize=3.5, linewidth=1.2, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown = sizes[:: max(1, len(sizes) // 4)]
    axes.set_xticks(shown, [format_bytes(size).replace(".0 ", " ") for size in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.grid(which="major", alpha=0.35)
    axes.set_xlabel("message on every rank", fontsize=9)


def _steps(axes: Any, methods: dict[str, Any]) -> None:
    names = [method for method in STYLES if method in methods]
    for place, method in enumerate(names):
        steps = [seconds * 1e3 for seconds in methods[method]["steps"]]
        middle = median(steps)
        axes.barh(place, middle, color=STYLES[method][0], height=0.7)
        axes.plot([min(steps), max(steps)], [place, place], color="black", linewidth=1)
        axes.annotate(
            f"{middle:.0f}", (max(steps), place), (4, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.margins(x=0.2)
    axes.set_xlabel("training step and its range (ms)", fontsize=9)
