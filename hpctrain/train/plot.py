"""The figure of a run: its loss, where the time of a step went, how far replicas were apart."""

from pathlib import Path
from typing import Any

from hpctrain.core.errors import ConfigError
from hpctrain.core.records import read

FEW = 20

_PARTS = (
    ("compute_s", "compute", "#4477aa"),
    ("communication_s", "exposed communication", "#ee6677"),
    ("input_s", "input", "#ccbb44"),
)


def plot_run(metrics: Path, figure_path: Path) -> None:
    """Draw the records of ``metrics`` into a PNG; not collective.

    Raises ``ConfigError``: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            "figures need matplotlib, which is not installed; pip install 'hpctrain[plots]', or "
            "turn them off with --set log.plots=false"
        ) from None
    records = read(metrics)
    steps = [record for record in records if record["event"] == "step"]
    tests = [record for record in records if record["event"] == "test"]
    is_local = any("drift" in record for record in steps)
    figure = Figure(figsize=(9, 9 if is_local else 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, *middle, lower = figure.subplots(3 if is_local else 2, 1, sharex=True)
    _draw_loss(upper, steps, tests)
    for axes in middle:
        _draw_drift(axes, steps)
    _draw_time(lower, steps)
    figure.savefig(figure_path, dpi=120)


def _draw_loss(axes: Any, steps: list[dict[str, Any]], tests: list[dict[str, Any]]) -> None:
    # A line needs points: a run of few records shows each of them.
    marker = "o" if len(steps) < FEW else ""
    style = {"label": "training", "color": "#228833", "linewidth": 1, "marker": marker}
    axes.plot(*_series(steps, "loss"), **style)
    axes.plot(*_series(tests, "loss"), label="test", color="#aa3377", marker="o", markersize=3)
    values = [v for v in _series(steps, "loss")[1] + _series(tests, "loss")[1] if v > 0]
    if values and max(values) > 10 * min(values):
        axes.set_yscale("log")
    axes.set_ylabel("loss")
    axes.set_title("what was learned", loc="left")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def _draw_drift(axes: Any, steps: list[dict[str, Any]]) -> None:
    steps = [record for record in steps if "drift" in record]
    marker = "o" if len(steps) < FEW else ""
    axes.plot(*_series(steps, "drift"), color="#66ccee", linewidth=1, marker=marker)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("distance")
    axes.set_title("how far replicas were from their mean", loc="left")
    axes.grid(alpha=0.3)


def _draw_time(axes: Any, steps: list[dict[str, Any]]) -> None:
    if steps:  # the first record speaks for the steps before it
        steps = [{**steps[0], "step": 0}, *steps]
    axes.stackplot(
        [record["step"] for record in steps],
        *([1e3 * record[name] for record in steps] for name, _, _ in _PARTS),
        labels=[label for _, label, _ in _PARTS],
        colors=[color for _, _, color in _PARTS],
    )
    axes.set_xlabel("step")
    axes.set_ylabel("time per step (ms)")
    axes.set_title("where the time of a step went", loc="left")
    axes.set_ylim(bottom=0, top=1.2 * axes.dataLim.ymax or 1)  # room for the legend
    axes.legend(frameon=False, loc="upper right", ncols=3)
    axes.grid(alpha=0.3)


def _series(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    # A loss that is not finite was written as null; a gap in the curve shows it.
    values = [float("nan") if record[name] is None else record[name] for record in records]
    return [record["step"] for record in records], values
