"""Draw figures into files with matplotlib; on HTML pages, ``templates/report.js`` draws them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any

from hpctrain.core.errors import ConfigError
from hpctrain.report.figure import RANKS, Figure, Series

# Tol's bright colours are distinct for colour-blind readers, on white and on black.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#999999")

# Shapes, which distinguish series on a print without colours.
MARKERS = "osD^vP*X"
HATCHES = ("", "////", "....", "xx", "--", "++", "oo", "**")

_WIDTH = 75  # characters of a warning
_SHIFT = 6.0  # points by which each further curve is shifted to the right
_GREY = "#5b646e"
_ROOM = 1.3  # height of the axis relative to the stacked parts, to leave space for the legend


def draw_files(figures: list[Figure], folder: Path, about: str = "") -> list[Path]:
    """Draw each figure into a PNG and an SVG file in a folder, and return the paths.

    ``about`` is the text above each figure; the note of the figure is below it.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    paths = []
    with canvases() as new_canvas:
        folder.mkdir(exist_ok=True)
        for figure in figures:
            canvas = draw_page(new_canvas(figsize=(7, 5.4)), [figure], about)
            for ending in ("png", "svg"):
                paths.append(folder / f"{figure.name}.{ending}")
                canvas.savefig(paths[-1], dpi=120)
    return paths


def draw_page(canvas: Any, figures: Sequence[Figure], about: str) -> Any:
    """Draw figures side by side with ``about`` above and their notes below; return the canvas."""
    canvas.set_layout_engine("constrained")
    inches = canvas.get_figwidth()
    title, *lines = about.split("\n")
    space = "\n" * len(lines)
    canvas.suptitle(title + space, x=0.01, ha="left", fontsize=8 + inches / 6, fontweight="bold")
    size = 6 + inches / 7
    above = {"x": 0.01, "ha": "left", "va": "top", "fontsize": size, "color": _GREY}
    canvas.text(
        y=0.985 - (10 + inches / 3) / 72 / canvas.get_figheight(), s="\n".join(lines), **above
    )
    for axes, figure in zip(
        canvas.subplots(1, len(figures), squeeze=False)[0], figures, strict=True
    ):
        _draw(axes, figure)
    notes = " ".join(dict.fromkeys(figure.note for figure in figures))
    note = fill(notes, round(17 * inches))
    canvas.supxlabel(note, x=0.01, ha="left", fontsize=size, color=_GREY)
    return canvas


def draw_panels(figures: Sequence[Figure], path: Path, title: str, about: str = "") -> None:
    """Draw figures in two columns into one file, with a title above and ``about`` below.

    The suffix of ``path`` selects the format.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    num_rows = max(1, (len(figures) + 1) // 2)
    with canvases() as new_canvas:
        canvas = new_canvas(figsize=(12, 0.9 + 3.4 * num_rows), layout="constrained")
        canvas.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold")
        panels = canvas.subplots(num_rows, 2, squeeze=False).flatten()
        for axes, figure in zip(panels, figures, strict=False):
            _draw(axes, figure)
        for axes in panels[len(figures) :]:
            axes.set_axis_off()
        canvas.supxlabel(about, x=0.01, ha="left", fontsize=9, color=_GREY)
        canvas.savefig(path, dpi=120)


def missing(name: str) -> ConfigError:
    """Return the error for a missing library, with the command that installs the library."""
    return ConfigError(
        f"{name} must be installed to draw, but is missing; pip install 'hpctrain[plots]'"
    )


@contextmanager
def canvases() -> Iterator[Any]:
    """Yield the class ``matplotlib.figure.Figure``, which creates an empty page.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import figure, rc_context  # noqa: PLC0415 - an optional package
    except ImportError:
        raise missing("matplotlib") from None
    # A "$" in a name must not start a formula.
    with rc_context({"text.parse_math": False}):
        yield figure.Figure


def _draw(axes: Any, figure: Figure) -> None:
    names = list(dict.fromkeys(x for series in figure.series for x in series.x))
    below = dict.fromkeys(names, 0.0)  # tops of the bars so far
    for number, series in enumerate(figure.series):
        x = series.x if figure.x_label else [names.index(name) for name in series.x]
        if series.kind != "bars":
            place = _beside(axes, series) if figure.x_label == RANKS else axes.transData
            _draw_points(axes, series, x, place)
            continue
        width = 0.8 if figure.is_stacked else 0.8 / len(figure.series)
        shift = 0 if figure.is_stacked else (number - (len(figure.series) - 1) / 2) * width
        bottom = [below[name] for name in series.x]
        look: dict[str, Any] = {"label": series.name, "color": _colour(series), "bottom": bottom}
        look |= {"hatch": HATCHES[series.colour % len(HATCHES)], "edgecolor": "white"}
        axes.bar([place + shift for place in x], series.y, width, **look)
        if figure.is_stacked:
            below |= {n: (y or 0) + b for n, y, b in zip(series.x, series.y, bottom, strict=True)}
    _draw_areas(axes, [series for series in figure.series if series.kind == "area"])
    axes.set_title(figure.title, loc="left")
    axes.set(xlabel=figure.x_label, ylabel=figure.y_label)
    _scale(axes, figure, names)
    axes.grid(alpha=0.3)
    if figure.warning:
        style: dict[str, Any] = {"color": "#cf222e", "fontsize": 9, "va": "bottom"}
        style["bbox"] = {"facecolor": "white", "alpha": 0.8, "linewidth": 0}
        text = fill(figure.warning, _WIDTH)
        axes.text(0.02, 0.03, text, transform=axes.transAxes, **style).set_in_layout(False)
    named: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        named.setdefault(label, handle)  # one entry for all series of a curve
    if named:
        size = 9 if len(named) < 6 else 7
        look = {"fontsize": size, "frameon": False, "columnspacing": 1.2}
        if figure.is_stacked:
            look |= {"loc": "upper right", "ncols": 3, "handlelength": 1.5}
        axes.legend(named.values(), named.keys(), **look).set_in_layout(False)


def _scale(axes: Any, figure: Figure, names: list[Any]) -> None:
    if figure.x_label == RANKS:
        axes.set_xscale("log")
        axes.set_xticks(sorted(names), map(str, sorted(names)))
        axes.minorticks_off()
    elif not figure.x_label:
        turn = {"rotation": 20, "ha": "right"} if len("".join(map(str, names))) > 50 else {}
        axes.set_xticks(range(len(names)), names, **turn)
    if figure.scale == "log":
        axes.set_yscale("log", subs=[])
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5), numticks=20)
        axes.yaxis.set_major_formatter("{x:g}")
    elif figure.scale == "linear":
        room = _ROOM if figure.is_stacked and figure.series else 1.0
        top = figure.top or axes.dataLim.ymax
        axes.set_ylim(0, room * top if figure.top or room > 1 else None)


def _draw_points(axes: Any, series: Series, x: list[Any], place: Any) -> None:
    """Draw a series; ``place`` is the transform of its points."""
    style: dict[str, Any] = {"color": _colour(series)}
    if not series.x:  # an empty series has no legend
        return
    if series.kind in ("points", "hollow", "repeats"):
        style["transform"] = place
    width = 0.8 * series.width
    if series.kind == "marks":
        for each in x:
            axes.axvline(each, linestyle=":", linewidth=1.2, label=series.name, **style)
    elif series.kind in ("solid", "dashed", "dotted"):
        axes.plot(x, series.y, linestyle=series.kind, linewidth=width, label=series.name, **style)
    elif series.kind == "linked":
        style |= {"markersize": 3 * width, "linewidth": width, "label": series.name}
        axes.plot(x, series.y, f"{_marker(series)}-", **style)
    elif series.kind == "faint":
        axes.plot(x, series.y, linewidth=0.8, alpha=0.3, **style)
    elif series.kind == "repeats":
        axes.plot(x, series.y, "x", markersize=4, alpha=0.6, label=series.name, **style)
    elif series.kind != "area":
        around = [series.below, series.above] if series.below else None
        face = {"markerfacecolor": "none"} if series.kind == "hollow" else {}
        style |= {"fmt": _marker(series), "capsize": 3, "label": series.name, **face}
        axes.errorbar(x, series.y, around, **style)


def _beside(axes: Any, series: Series) -> Any:
    """Return a transform that shifts a curve, so that error bars at the same x do not overlap."""
    from matplotlib.transforms import offset_copy  # noqa: PLC0415 - an optional package

    # matplotlib ignores points with a transform other than transData in the limits of the axes.
    nothing = [0.0] * len(series.x)
    ends = zip(series.y, series.below or nothing, series.above or nothing, strict=True)
    for x, (y, below, above) in zip(series.x, ends, strict=True):
        if y is not None:
            axes.update_datalim([(x, y - below), (x, y + above)])
    axes.autoscale_view()
    shift = _SHIFT * (series.colour % len(MARKERS))
    return offset_copy(axes.transData, fig=axes.figure, x=shift, units="points")


def _draw_areas(axes: Any, areas: list[Series]) -> None:
    """Draw stacked areas, which must have the same values of x."""
    if areas and areas[0].x:
        style = {"labels": [each.name for each in areas], "colors": list(map(_colour, areas))}
        axes.stackplot(areas[0].x, *(each.y for each in areas), **style)


def _marker(series: Series) -> str:
    return MARKERS[series.colour % len(MARKERS)]


def _colour(series: Series) -> str:
    return COLOURS[series.colour % len(COLOURS)]
