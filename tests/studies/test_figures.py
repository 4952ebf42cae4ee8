"""Figures show all measurements and nothing else."""

import json
from dataclasses import replace

import matplotlib.figure
import pytest

from hpctrain.cost.machine import Link, Machine
from hpctrain.report import drawing
from hpctrain.studies.figures import figures_of
from tests.studies import generated


def figures(results):
    return {figure.name: figure for figure in figures_of(results)}


def series(figure, *kinds):
    return [each for each in figure.series if each.kind in kinds and each.x]


def test_a_complete_study_has_every_figure():
    names = list(figures(generated.complete()))
    assert names == [
        *("time", "throughput", "speed_up", "efficiency", "core-hours", "time-to-target"),
        *("breakdown", "bytes", "learning", "learned-by-bytes"),
    ]


def test_oversubscribed_points_are_hollow_and_have_no_efficiency():
    found = figures(generated.complete())
    assert [each.x for each in series(found["time"], "points")] == [[1, 2, 4]] * 2
    assert [each.x for each in series(found["time"], "hollow")] == [[8]] * 2
    assert [each.x for each in series(found["efficiency"], "points", "hollow")] == [[1, 2, 4]] * 2
    assert "Hollow" in found["time"].note
    assert "Hollow" not in found["efficiency"].note


def test_lines_cover_only_measured_points():
    records = [each for each in generated.records() if each.point["ranks"] != 4]
    failed = [
        replace(each, status="failed", step_s=[]) for each in records if each.point["ranks"] == 8
    ]
    kept = [each for each in records if each.point["ranks"] < 4]
    found = figures(generated.complete(records=kept + failed))
    for name in ("time", "throughput", "efficiency"):
        for each in series(found[name], "dashed", "dotted", "points", "repeats"):
            assert set(each.x) == {1, 2}


@pytest.mark.parametrize(("mode", "growth"), [("strong", 1), ("weak", 0)])
def test_the_ideal_line_contains_the_base_point(mode, growth):
    results = generated.complete(config=generated.config(mode=mode))
    ideal = series(figures(results)["time"], "dashed")[0]
    base = results.summaries[0].step_s.value
    assert ideal.y == [pytest.approx(base / ranks**growth) for ranks in (1, 2, 4, 8)]
    assert series(figures(results)["efficiency"], "dashed")[0].y == pytest.approx([1] * 4)


def test_the_bound_follows_the_links_and_is_never_below_the_ideal():
    results = generated.complete(bound=None)
    ideal = [each.ideal_s for each in results.summaries]
    fast = results.with_bound(Machine(nodes=8))
    assert [fast.bound(each.point) for each in results.summaries] == ideal
    slow = results.with_bound(Machine(nodes=8, network=Link(0, 8e6), node=Link(0, 70e6)))
    bound = [slow.bound(each.point) for each in results.summaries][:4]
    # 4e6 bytes per rank but the first through its memory, and 4e6 bytes through one network
    # adapter.
    assert bound == pytest.approx([ideal[0], ideal[1], 12e6 / 4 / 70e6, 4e6 / 8e6])
    [dotted, _] = series(figures(slow)["time"], "dotted")
    assert dotted.y == bound
    share = series(figures(slow)["efficiency"], "dotted")[0]
    assert share.y[-1] == pytest.approx(ideal[3] / 0.5)


def test_points_of_one_size_have_a_categorical_axis():
    asked = generated.config({"ranks": [4], "codec": ["none", "bf16"]})
    results = generated.complete(config=asked, records=generated.records(asked))
    figure = figures(results)["time"]
    assert figure.x_label == ""
    assert [each.x for each in series(figure, "points")] == [["codec none", "codec bf16"]]
    assert series(figure, "dashed", "dotted") == []


def test_a_time_to_target_missed_by_a_repeat_is_not_shown():
    records = generated.records()
    records[0] = replace(records[0], time_to_target_s=None)
    reached = {
        (each.name, x)
        for each in series(
            figures(generated.complete(records=records))["time-to-target"], "points", "hollow"
        )
        for x in each.x
    }
    assert len(reached) == 7


def test_learning_curves_follow_the_records_of_ranks(tmp_path):
    results = generated.complete(directory=tmp_path)
    ends = series(figures(results)["learning"], "points")
    assert sum(len(each.x) for each in ends) == len(results.done)
    folder = tmp_path / results.done[0].folder / "records"
    folder.mkdir(parents=True)
    assert {x for each in ends for x in each.x} == {each.elapsed_s for each in results.done}
    (folder / "a.jsonl").write_text(json.dumps({"step": 0, "at": 7, "samples": 1}) + "\n")
    lines = [
        {"step": step, "at": 7.0 + step, "seconds": 0.5, "accuracy": 0.1 * step}
        for step in range(5)
    ]
    lines.append({"step": 5, "at": 12.5, "accuracy": float("nan")})
    (folder / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [curve] = series(figures(results)["learning"], "solid")
    assert curve.x == [0.5, 1.5, 2.5, 3.5, 4.5]  # from the start of the first step
    assert curve.y == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    (folder / "b.jsonl").write_text(json.dumps({"step": 5, "at": 12.0, "accuracy": 0.5}) + "\n")
    assert not series(figures(results)["learning"], "solid")  # no line through one point
    for num_points in (100, 101, 299, 300):
        many = [{"step": i, "at": float(i), "accuracy": i / 300} for i in range(num_points)]
        (folder / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in many))
        [curve] = series(figures(results)["learning"], "solid")
        assert len(curve.x) <= 100
        assert curve.x[-1] == num_points - 1  # the last point is always shown


def test_speed_up_and_core_hours_follow_from_efficiency_and_rate():
    results = generated.complete()
    found = figures(results)
    for place, summary in enumerate(results.summaries[:3]):
        [one, *_] = series(found["speed_up"], "points")
        assert one.y[place] == pytest.approx(summary.efficiency.value * summary.ranks)
        [cost, *_] = series(found["core-hours"], "points")
        rate = summary.samples_per_s.value
        assert cost.y[place] == pytest.approx(1e6 * summary.ranks / rate / 3600, rel=0.02)
    assert series(found["speed_up"], "dashed")[0].y == pytest.approx([1, 2, 4, 8])
    assert len({*series(found["core-hours"], "dashed")[0].y}) <= 4


def test_error_bars_of_curves_are_separated_and_inside_the_axes():
    noisy = {"ranks": 2, "codec": "bf16"}
    records = [
        replace(each, step_s=[9.0**each.repeat * s for s in each.step_s])
        if each.point == noisy
        else each
        for each in generated.records()
    ]
    results = generated.complete(records=records)
    for name, is_shifted in (("time", True), ("learned-by-bytes", False)):
        axes = matplotlib.figure.Figure().subplots()
        figure = figures(results)[name]
        drawing._draw(axes, figure)
        points = series(figure, "points", "hollow")
        for each in points:
            for y, below, above in zip(each.y, each.below or [0], each.above or [0], strict=False):
                low, high = axes.get_ylim()
                assert low <= y - below <= y + above <= high
        drawn = [line for line in axes.get_lines() if line.get_marker() in drawing.MARKERS]
        on_screen = [line.get_transform().transform((2, 1))[0] for line in drawn]
        x = {round(float(each), 3) for each in on_screen}
        assert len(x) == (2 if is_shifted else 1)
        markers = {line.get_marker() for line in drawn}
        assert markers == {drawing.MARKERS[each.colour] for each in points}


def legend_of(figure):
    canvas = matplotlib.figure.Figure()
    axes = canvas.subplots()
    drawing._draw(axes, figure)
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def test_a_legend_names_the_curve_of_each_line_unless_the_lines_coincide():
    records = [
        replace(each, point={"ranks": each.point["ranks"], "mode": mode})
        for mode in ("strong", "weak")
        for each in generated.records(generated.config({"ranks": [1, 2, 4]}))
    ]
    found = figures(generated.complete(records=records, bound=None))
    ideal = [text for text in legend_of(found["time"]) if text.endswith("ideal")]
    assert ideal == ["strong scaling: ideal", "weak scaling: ideal"]
    for name in ("speed_up", "efficiency"):
        assert [text for text in legend_of(found[name]) if "ideal" in text] == ["ideal"]
        assert [each.colour for each in series(found[name], "dashed")] == [0, 0]


@pytest.mark.parametrize("bound", [None, generated.bound])
def test_a_legend_has_exactly_the_drawn_series(bound):
    asked = generated.config({"ranks": [1, 2, 4, 8]})
    results = generated.complete(config=asked, records=generated.records(asked), bound=bound)
    found = figures(results)
    lines = ["ideal", *(["bound of the machine"] if bound else [])]
    bars = "bars: 93.8 % interval"
    output = ["each repeat", f"median, {bars}", "more ranks than cores", *lines]
    assert sorted(legend_of(found["time"])) == sorted(output)
    efficiency = legend_of(found["efficiency"])
    assert {*efficiency} >= {"ideal"}
    assert any(text.startswith("ratio of medians, bars: ") for text in efficiency)
    assert "each repeat" not in efficiency
    assert found["efficiency"].y_label == "fraction of linear scaling"


def test_the_caption_has_mode_model_batch_machine_versions_and_date():
    asked = generated.config(model="CNN of 1 M parameters")
    records = generated.records(gpu="NVIDIA H200")
    assert generated.complete(config=asked, records=records).caption.splitlines() == [
        "digits: strong scaling of CNN of 1 M parameters",
        "64 samples in a step of all ranks",
        "login1, NVIDIA H200 for each rank, AMD EPYC 7763, 4 cores on 1 host",
        "hpctrain ?, torch 2.13.0, Open MPI 5.0.11, 2026-11-25",
    ]


def test_the_cost_of_ranks_with_gpus_is_in_gpu_hours():
    costs = figures(generated.complete(records=generated.records(gpu="NVIDIA H200")))
    assert costs["core-hours"].y_label == "GPU-hours per million samples"
    assert figures(generated.complete())["core-hours"].y_label.startswith("core-hours")


def test_samples_per_step_are_an_integer_or_a_mean():
    records = [replace(each, samples=each.samples - 5) for each in generated.records()]
    caption = generated.complete(records=records).caption
    mean = records[0].samples / records[0].num_steps
    assert f"on average {mean:.1f} samples in a step" in caption
    other = [replace(each, samples=each.samples - 9 * each.point["ranks"]) for each in records]
    assert generated.complete(records=other).caption.count("on average") == 1
    about = generated.environment(mpi=None)
    assert "no MPI library recorded" in generated.complete(environment=about).caption
