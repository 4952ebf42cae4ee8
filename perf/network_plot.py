"""The figure of ``bench_network.py``: time against size, a panel for every cluster."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from hpctrain.core.units import KIB, format_bytes

STYLES = {
    "bucket": ("hpctrain, bucket in node memory", "#4477aa", "o", "-"),
    "tensor": ("hpctrain, ordinary tensor", "#66ccee", "s", "-"),
    "named": ("hpctrain, by name", "#332288", "X", "-"),
    "MPI, block order": ("MPI_Allreduce, ranks node by node", "#ee6677", "^", "--"),
    "MPI, cyclic order": ("MPI_Allreduce, ranks round robin", "#aa3377", "v", "--"),
    "gloo": ("gloo", "#ccbb44", "D", "--"),
}
"""Label, colour, marker and line of each method, distinguishable by colour-blind readers."""
LIBRARIES = {"openmpi": "Open MPI", "mpich": "MPICH"}
LINE_TIME = ("what the links allow", "#999999")
PANEL_INCHES = (3.6, 2.9)
LEGEND_ROW_INCHES = 0.22


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw all results into a PNG: a row for each library and rate, a column for each shape."""
    rows = list(dict.fromkeys((result["mpi"], result["rate"]) for result in results))
    columns = list(dict.fromkeys(result["cluster"] for result in results))
    width, height = PANEL_INCHES
    legend_rows = -(-(len(STYLES) + 1) // len(columns))
    height_of_all = height * len(rows) + 0.6 + LEGEND_ROW_INCHES * legend_rows
    figure = Figure(figsize=(width * len(columns) + 0.6, height_of_all), dpi=150)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    grid = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey="row")
    for axes_of_row, (mpi, rate) in zip(grid, rows, strict=True):
        for axes, cluster in zip(axes_of_row, columns, strict=True):
            key = {"mpi": mpi, "rate": rate, "cluster": cluster}
            found = [r for r in results if key.items() <= r.items()]
            _panel(axes, sorted(found, key=lambda result: result["bytes"]))
            title = f"{cluster} ranks, {_rate(rate)} links, {LIBRARIES.get(mpi, mpi)}"
            axes.set_title(title, fontsize=9)
        axes_of_row[0].set_ylabel("time of one all-reduce (ms)")
    for axes in grid[-1]:
        axes.set_xlabel("message on every rank")
    legends = [axes.get_legend_handles_labels() for axes in grid.flat]
    handles, labels = max(legends, key=lambda legend: len(legend[1]))
    place = {"loc": "outside lower center", "ncols": len(columns)}
    figure.legend(handles, labels, frameon=False, fontsize=9, **place)
    figure.savefig(path)


def _panel(axes: Any, results: list[dict[str, Any]]) -> None:
    sizes = [result["bytes"] for result in results]
    if not sizes:
        axes.set_visible(False)
        return
    label, color = LINE_TIME
    line_ms = [result["line s"] * 1e3 for result in results]
    axes.plot(sizes, line_ms, label=label, color=color, linewidth=3, alpha=0.6)
    for name, (label, color, marker, line) in STYLES.items():
        if any(name in result["seconds"] for result in results):
            times = [result["seconds"].get(name, float("nan")) * 1e3 for result in results]
            style = {"color": color, "marker": marker, "linestyle": line}
            axes.plot(sizes, times, label=label, markersize=4.5, linewidth=1.3, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [_size(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(which="major", alpha=0.35)
    axes.grid(which="minor", axis="y", alpha=0.12)
    axes.margins(x=0.08)


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes).replace(".0 ", " ") if num_bytes >= KIB else str(num_bytes)


def _rate(rate: str) -> str:
    return rate.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s").replace("kbit", " kbit/s")
