"""Draw all charts of ``perf/results`` from the JSON files in that folder, without measurements.

    python perf/charts.py [FOLDER]

A chart is drawn if its JSON files are in the folder, and is written next to them as PNG.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import data_plot
import engines_plot
import local_sgd_plot
import network_plot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from measure import median

RESULTS = Path(__file__).with_name("results")
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
NODE_STYLES = {
    "bucket": ("hpctrain, bucket in node memory", "#4477aa", "o"),
    "tensor": ("hpctrain, ordinary tensor", "#66ccee", "s"),
    "Open MPI": ("Open MPI", "#ee6677", "^"),
    "MPICH": ("MPICH", "#aa3377", "v"),
    "Intel MPI": ("Intel MPI", "#228833", "<"),
    "gloo": ("gloo", "#ccbb44", "D"),
    "DeepSpeed": ("DeepSpeed", "#bbbbbb", ">"),
}
STEP_STYLES = {
    "hpctrain": ("hpctrain", "#4477aa", "o"),
    "Horovod": ("Horovod", "#ee6677", "^"),
    "torch DDP, gloo": ("DDP over gloo", "#ccbb44", "D"),
    "plain MPI": ("MPI_Allreduce", "#aa3377", "v"),
}
"""Label, color and marker of each curve."""
RATE, SCALED_BYTES = "1gbit", 4 << 20  # of the links, and of the all-reduce, in scaling.png


def bandwidth(files: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw message bytes per second of an all-reduce inside a node, a panel for each file."""
    figure, panels = _panels(len(files))
    for axes, found in zip(panels, files, strict=True):
        sizes = [_bytes_of(row["size"]) for row in found["rows"]]
        for name, (label, color, marker) in NODE_STYLES.items():
            if f"{name} us" not in found["rows"][0]:
                continue
            seconds = [row[f"{name} us"] * 1e-6 for row in found["rows"]]
            rates = [size / took / 1e9 for size, took in zip(sizes, seconds, strict=True)]
            axes.plot(sizes, rates, label=label, color=color, marker=marker, markersize=4)
        axes.set(xscale="log", yscale="log", xlabel="message on every rank (bytes)")
        axes.set_title(f"{found['machine']['ranks']} ranks on one node", fontsize=9)
    panels[0].set_ylabel("message / time (GB/s)")
    _finish(figure, panels[:1], path)


def scaling(files: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the time of an all-reduce, and the efficiency of a step, by the number of nodes."""
    network, *engines = files
    figure, (left, right) = _panels(2)
    rows = [r for r in network["results"] if (r["rate"], r["bytes"]) == (RATE, SCALED_BYTES)]
    rows.sort(key=lambda row: row["nodes"])
    for name in ("bucket", "MPI, block order", "gloo"):
        label, color, marker, _ = network_plot.STYLES[name]
        times = [row["seconds"].get(name, float("nan")) * 1e3 for row in rows]
        left.plot([r["nodes"] for r in rows], times, label=label, color=color, marker=marker)
    left.set(ylabel="all-reduce of 4 MiB (ms)", ylim=(0, None))
    results = [world for one in engines for world in one["results"]]
    worlds = {_nodes_of(world["world"]): world["ways"] for world in results}
    for name, (label, color, marker) in STEP_STYLES.items():
        points = [
            (nodes, median(methods["no communication"]["steps"]) / median(methods[name]["steps"]))
            for nodes, methods in sorted(worlds.items())
            if name in methods
        ]
        right.plot(*zip(*points, strict=True), label=label, color=color, marker=marker)
    right.set(ylabel="step without communication / step", ylim=(0, 1))
    for axes in (left, right):
        axes.set(xlabel="nodes of two ranks, 1 Gbit/s between nodes", xticks=[1, 2, 3, 4])
        axes.legend(frameon=False, fontsize=8)
    _finish(figure, (), path)


def _bytes_of(size: str) -> float:
    number, unit = size.split()
    return float(number) * UNITS[unit]


def _nodes_of(world: str) -> int:
    found = re.match(r"(\d+) nodes", world)
    return int(found[1]) if found else 1


def _panels(number: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.6 * number, 3.9), dpi=150)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    return figure, figure.subplots(1, number, squeeze=False)[0]


def _finish(figure: Figure, labelled: Sequence[Any], path: Path) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.35)
    for axes in labelled:
        where = {"loc": "outside lower center", "ncols": 4, "frameon": False, "fontsize": 8}
        figure.legend(*axes.get_legend_handles_labels(), **where)
    figure.savefig(path)


CHARTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "bandwidth": (("allreduce-2", "allreduce-4"), bandwidth),
    "scaling": (("network-openmpi", "engines", "engines-1gbit"), scaling),
    "engines": (("engines",), lambda files, path: engines_plot.draw(files[0]["results"], path)),
    "data": (("data",), lambda files, path: data_plot.draw(files[0]["rows"], path)),
    "local-sgd": (
        ("local-sgd",),
        lambda files, path: local_sgd_plot.draw(files[0]["results"], path),
    ),
    **{
        name: ((name,), lambda files, path: network_plot.draw(files[0]["results"], path))
        for name in ("network-openmpi", "network-mpich")
    },
}
"""Files that each chart needs, and the function that draws it."""


def main() -> None:
    """Draw the charts whose JSON files exist, and print their names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS, help="of the results")
    folder = parser.parse_args().folder
    for name, (stems, draw) in CHARTS.items():
        paths = [folder / f"{stem}.json" for stem in stems]
        if missing := [path.name for path in paths if not path.exists()]:
            sys.stderr.write(f"{name}.png is not drawn: no {', '.join(missing)}\n")
            continue
        files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        draw(files, folder / f"{name}.png")
        sys.stdout.write(f"{folder / name}.png\n")


if __name__ == "__main__":
    main()
