"""Figures of runs show all records, report values that are not finite, and mark resumes."""

import json
import sys
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.core.errors import ConfigError
from hpctrain.core.keys import dumps
from hpctrain.train.history import RunHistory, found_in, histories
from hpctrain.train.metrics import Metrics
from hpctrain.train.run_figures import MAX_POINTS, draw_runs, figures_of
from tests.processes import hpctrain_without
from tests.studies.test_report import HOSTILE, Page

TIMES = {"compute_s": 0.01, "communication_s": 0.002, "input_s": 0.001}
RESULT = {"metric": 0.9, "metric_name": "accuracy"}
BEGUN = {"world_size": 2, "nodes": 1, "num_steps": 40}


def write_run(path, losses=(2.0, 1.0, 0.5, 0.4), *, settings="", resumed=0, end="", **more):
    """Write the files of a run, with a record for each step."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(f'name = "small"\n{settings}\n[test]\nmetric = "accuracy"\n')
    (path / "env.json").write_text(json.dumps({"torch": "2", "started": path.name}))
    times = {name: [seconds, 2 * seconds] for name, seconds in TIMES.items()}
    (path / "ranks.json").write_text(json.dumps({"step": 1, **times}))
    with Metrics(path / "metrics.jsonl") as metrics:
        metrics.write("started", part=1, **BEGUN)
        for step, loss in enumerate(losses, 1):
            if resumed == step:
                metrics.write("resumed", part=2, step=step, ended_by="SIGTERM", **BEGUN)
            about = {"step": step, "epoch": 1, "lr": 0.1, "samples_per_s": 100.0}
            metrics.write("step", loss=loss, **about, **TIMES, **more)
        metrics.write("test", step=len(losses), loss=0.5, metric=0.9)
        if end:
            metrics.write(end, step=len(losses), reason="loss is nan on rank 1", **RESULT)
    return path


def figures(*paths, smooth=0):
    return {figure.name: figure for figure in figures_of(histories(paths), smooth)}


def hpctrain(*words, code=0):
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == code, f"{result.output} {result.exception!r}"
    return result.output


def test_a_run_has_figures_of_curves_times_ranks_and_drift(tmp_path):
    found = figures(write_run(tmp_path / "a", drift=0.1))
    names = ("loss", "metric-0", "lr", "time", "samples_per_s", "drift", "ranks-0")
    assert tuple(found) == names
    assert [each.y for each in found["loss"].series] == [[2.0, 1.0, 0.5, 0.4], [0.5]]
    assert [each.y for each in found["time"].series] == [[10.0] * 5, [2.0] * 5, [1.0] * 5]
    assert found["ranks-0"].series[0].x == [
        "rank 1",
        "rank 0",
    ]  # sorted by time, the slowest rank first
    assert found["metric-0"].title == "Test accuracy"


def test_figures_are_named_after_validation_or_test_samples(tmp_path):
    held = write_run(tmp_path / "a", settings="[data]\nvalidation = 0.2\n")
    other = write_run(tmp_path / "b")
    found = figures(held)
    assert found["metric-0"].title == "Validation accuracy"
    assert found["metric-0"].note == "Of all validation samples."
    assert [each.name for each in found["loss"].series] == ["training", "validation"]
    assert figures(held, other)["metric-0"].title == "Validation or test accuracy"


def test_every_metric_of_a_test_has_a_figure(tmp_path):
    path = write_run(tmp_path / "a")
    with Metrics(path / "metrics.jsonl") as metrics:
        metrics.write(
            "test", step=5, loss=1.0, metric=0.7, metrics={"f1": 0.7, "top5": float("nan")}
        )
    found = figures(path)
    assert [each.title for name, each in found.items() if name.startswith("metric")] == [
        *("Test accuracy", "Test f1", "Test top5"),
    ]
    assert [each.y for each in found["metric-2"].series] == [[None, None]]


def test_averages_keep_constants_and_gaps_and_stay_between_the_extremes(tmp_path):
    nan = float("nan")
    losses = [3.0] * 30 + [nan, nan] + [1.0] * 30
    faint, full, _ = figures(write_run(tmp_path / "a", losses), smooth=9)["loss"].series[:3]
    assert (faint.kind, full.kind) == ("faint", "solid")
    assert faint.y == [*losses[:30], None, None, *losses[32:]]
    assert [place for place, y in enumerate(full.y) if y is None] == [30, 31]
    assert full.y[:30] == pytest.approx([3.0] * 30)
    later = full.y[32:]
    assert all(1.0 < b < a < 3.0 for a, b in pairwise(later))
    assert later[-1] == pytest.approx(1.0, abs=0.01)
    plain = figures(tmp_path / "a", smooth=1)["loss"].series[0]
    assert (plain.kind, plain.y) == ("solid", faint.y)


def test_failures_and_values_that_are_not_finite_are_reported_and_marked(tmp_path):
    losses = [1.0, float("nan"), float("inf"), 1.0]
    found = figures(write_run(tmp_path / "a", losses, end="failed"))["loss"]
    assert found.warning == (
        "the loss is not finite in 2 of 4 records, first at step 2; failed after step 4: loss is "
        "nan on rank 1"
    )
    [marks] = [each for each in found.series if each.kind == "marks"]
    assert (marks.name, marks.x) == ("not finite", [2, 3])
    assert figures(write_run(tmp_path / "b"))["loss"].warning == ""


def test_curves_of_equal_runs_have_different_widths(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("a", "b", "c")]
    for figure in figures(*runs).values():
        for kind in ("solid", "linked"):
            widths = [each.width for each in figure.series if each.kind == kind and each.x]
            whole = [w for w in widths if widths.count(w) < len(widths)]
            assert not widths or len(set(whole)) == 3
            assert widths == sorted(widths, reverse=True) or figure.name == "loss"


def test_overlaid_runs_have_different_colours(tmp_path):
    found = figures(
        write_run(tmp_path / "x/run"), write_run(tmp_path / "y/run", resumed=3), smooth=1
    )
    curves = {each.name: each for each in found["loss"].series}
    labels = ["x/run", "y/run"]  # the folder names alone are equal
    assert list(curves) == [
        *(f"{name} training" for name in labels),
        *(f"{name} test" for name in labels),
        f"{labels[1]} resumed",
    ]
    assert curves[f"{labels[1]} resumed"].x == [3]
    assert [each.colour for each in curves.values()] == [0, 1, 0, 1, 1]
    assert found["time"].series[0].x == labels
    assert found["time"].series[0].y == pytest.approx([10.0, 10.0])


def test_high_peaks_are_cut_off(tmp_path):
    path = write_run(tmp_path / "a", [1.0] * 40)
    with Metrics(path / "metrics.jsonl") as metrics:
        about = {"epoch": 1, "loss": 1.0, "lr": 0.1, "samples_per_s": 9e9}
        metrics.write("step", step=41, **about, **dict.fromkeys(TIMES, 100))
    found = figures(path)
    assert found["samples_per_s"].top == pytest.approx(200)
    assert found["time"].top == pytest.approx(26)
    assert "cut off" in found["time"].note
    assert found["lr"].top is None


def test_a_long_run_is_reduced_to_the_points_of_a_screen(tmp_path):
    found = figures(write_run(tmp_path / "a", [1.0] * (2 * MAX_POINTS + 1)))
    assert all(
        len(each.x) <= MAX_POINTS for name in ("loss", "time") for each in found[name].series
    )


def test_the_plot_has_run_ranks_metric_rate_and_resumes(tmp_path):
    path = write_run(tmp_path / "a", settings="[optimizer]\nlr = 0.25", resumed=3)
    message = hpctrain("plot", path, "--out", tmp_path / "a.svg")
    assert message.strip() == str(tmp_path / "a.svg")
    shown = (tmp_path / "a.svg").read_text()  # the SVG has each text as a comment
    for text in (
        "<!-- a (small) -->",
        "2 ranks on 1 node, learning rate 0.25, 4 of 40 steps, test loss 0.5000, ",
        "test accuracy 0.9000, resumed after step 3",
        *("<!-- Loss -->", "<!-- Test accuracy -->", "<!-- Learning rate -->"),
        *("<!-- resumed -->", "<!-- exposed communication -->"),
    ):
        assert text in shown
    hpctrain("plot", path)
    assert (path / "plots/training.png").read_bytes().startswith(b"\x89PNG")


def test_impossible_plots_raise_errors_with_a_remedy(tmp_path, monkeypatch):
    path = write_run(tmp_path / "a")
    runs = histories([path])
    with pytest.raises(ConfigError, match=r"end in \.png, \.svg, \.pdf, got a\.gif"):
        draw_runs(runs, tmp_path.relative_to(tmp_path) / "a.gif")
    with pytest.raises(ConfigError, match=r"cannot be written: .*; name another file with --out"):
        draw_runs(runs, path / "config.toml" / "a.png")
    (path / "config.toml").write_text("name = ")
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read"):
        RunHistory.read(path)
    with pytest.raises(ConfigError, match="must contain run directories"):
        found_in(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="contains no run"):
        RunHistory.read(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'hpctrain\[plots\]'"):
        draw_runs(runs, tmp_path / "a.png")


def test_a_run_without_a_step_record_is_named(tmp_path):
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", losses=())]
    message = hpctrain("report", *paths, "--out", tmp_path / "both.html")
    assert message.count("has no record of a step yet") == 1
    assert f"{paths[1]} has no record" in message


def test_a_report_has_all_differences_and_escapes_names(tmp_path):
    odd = HOSTILE.removesuffix("\ud800")
    one = write_run(tmp_path / "one", settings=f"[optimizer]\nargs = {{ x = {dumps(odd)} }}")
    two = write_run(tmp_path / "two", settings="[optimizer]\nargs = { x = 1 }", resumed=2)
    message = hpctrain("report", one, two, "--out", tmp_path / "page.html")
    assert message.strip() == str(tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert [[cell for cell, _ in row] for row in page.rows("configuration")] == [
        ["optimizer.args.x", odd, "1"]
    ]
    assert ["name", "small", "small"] in [
        [cell for cell, _ in row] for row in page.rows("configuration-all")
    ]
    assert [row[0][0] for row in page.rows("environment")] == ["started"]
    parts = [[cell for cell, _ in row[:3]] for row in page.rows("parts")]
    assert parts[-1] == ["two", "2", "2"]
    assert not [tag for tag, values in page.tags if tag == "img" or "src" in values]
    hpctrain("report", one)
    alone = Page((one / "report.html").read_text())
    assert [row[0][0] for row in alone.rows("configuration")] == ["name", "optimizer.args.x"]


def test_a_comparison_has_all_differences_and_exits_with_0(tmp_path):
    paths = [write_run(tmp_path / name, settings=f"seed = {n}") for n, name in enumerate("ab")]
    message = [line.split() for line in hpctrain("compare", *paths).splitlines()]
    assert ["seed", "0", "1"] in message
    assert ["test", "accuracy", "0.9000", "0.9000"] in message
    assert ["environment:", "the", "same"] in message
    assert "name" not in {line[0] for line in message if line}
    result = CliRunner().invoke(app, ["compare", str(paths[0])])
    assert "two runs or more" in str(result.exception)


def test_runs_are_listed_by_start_with_their_status(tmp_path, caplog):
    for number, end in enumerate(("finished", "stopped", "failed")):
        write_run(tmp_path / str(9 - number), end=end)
    damaged = write_run(tmp_path / "damaged")
    (damaged / "config.toml").write_text("name = ")
    rows = [line.split()[:5] for line in hpctrain("runs", tmp_path).splitlines()[1:]]
    assert "config.toml cannot be read" in caplog.text
    assert rows == [
        ["7", "failed", "4", "of", "40"],
        ["8", "stopped", "4", "of", "40"],
        ["9", "finished", "4", "of", "40"],
    ]


@pytest.mark.parametrize(
    "command",
    [
        "plot",
        *(pytest.param(name, marks=pytest.mark.conformance) for name in ("report", "compare")),
    ],
)
def test_results_are_shown_without_torch_and_mpi(tmp_path, command):
    runs = [write_run(tmp_path / "a")] * (2 if command == "compare" else 1)
    assert hpctrain_without("torch mpi4py", command, *runs).returncode == 0
