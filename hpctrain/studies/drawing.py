"""Figures drawn into files, by matplotlib; ``templates/report.js`` draws the same on a page."""

from pathlib import Path
from typing import Any

from hpctrain.core.errors import ConfigError
from hpctrain.studies.figures import RANKS, Figure, Series

# Tol's bright colours, which colour-blind readers tell apart, on white and on black.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#999999")


def draw_files(figures: list[Figure], folder: Path) -> list[Path]:
    """Draw each figure into a PNG and an SVG in a folder, and return their paths.

    Raises ``ConfigError``: matplotlib is not installed. ``OSError``: the file system refuses.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415
        from matplotlib.figure import Figure as Canvas  # noqa: PLC0415
    except ImportError:
        raise missing("matplotlib") from None
    folder.mkdir(exist_ok=True)
    paths = []
    # What users name is no formula: a "$" would make it one.
    with mpl.rc_context({"text.parse_math": False}):
        for figure in figures:
            canvas = Canvas(figsize=(7, 4.5), layout="constrained")
            _draw(canvas.subplots(), figure)
            for ending in ("png", "svg"):
                paths.append(folder / f"{figure.name}.{ending}")
                canvas.savefig(paths[-1], dpi=120)
    return paths


def missing(name: str) -> ConfigError:
    """Return the error that says how to get a library."""
    return ConfigError(
        f"a report needs {name}, which is not installed; pip install 'hpctrain[plots]'"
    )


def _draw(axes: Any, figure: Figure) -> None:
    names = list(dict.fromkeys(x for series in figure.series for x in series.x))
    below = dict.fromkeys(names, 0.0)  # tops of the bars so far
    for number, series in enumerate(figure.series):
        x = series.x if figure.x_label else [names.index(name) for name in series.x]
        if series.kind != "bars":
            _draw_points(axes, series, x)
            continue
        width = 0.8 if figure.is_stacked else 0.8 / len(figure.series)
        shift = 0 if figure.is_stacked else (number - (len(figure.series) - 1) / 2) * width
        style = {"label": series.name, "color": _colour(series)}
        bottom = [below[name] for name in series.x]
        axes.bar([place + shift for place in x], series.y, width, bottom=bottom, **style)
        if figure.is_stacked:
            below |= {n: y + b for n, y, b in zip(series.x, series.y, bottom, strict=True)}
    axes.set_title(figure.title, loc="left")
    axes.set(xlabel=figure.x_label, ylabel=figure.y_label)
    if figure.x_label == RANKS:
        axes.set_xscale("log")
        axes.set_xticks(sorted(names), map(str, sorted(names)))
        axes.minorticks_off()
    elif not figure.x_label:
        axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    if figure.scale == "log":
        axes.set_yscale("log", subs=[])
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5), numticks=20)
        axes.yaxis.set_major_formatter("{x:g}")
    elif figure.scale == "linear":
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    named: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        named.setdefault(label, handle)  # hollow points have the name of the others
    if named:
        axes.legend(named.values(), named.keys(), frameon=False)


def _draw_points(axes: Any, series: Series, x: list[Any]) -> None:
    style: dict[str, Any] = {"color": _colour(series)}
    if series.kind in ("solid", "dashed", "dotted"):
        axes.plot(x, series.y, linestyle=series.kind, linewidth=1.2, label=series.name, **style)
    elif series.kind == "repeats":
        axes.plot(x, series.y, "o", markersize=2.5, alpha=0.4, **style)
    elif series.x:
        around = [series.below, series.above] if series.below else None
        face = {"markerfacecolor": "none"} if series.kind == "hollow" else {}
        style |= {"fmt": "o", "capsize": 3, "label": series.name, **face}
        axes.errorbar(x, series.y, around, **style)


def _colour(series: Series) -> str:
    return COLOURS[series.colour % len(COLOURS)]
