"""Check the fit: it finds the figures from which the times were made, and its error is right."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.core.errors import ConfigError
from hpctrain.core.keys import render
from hpctrain.cost.collectives import allreduce
from hpctrain.cost.fitting import (
    Point,
    fit,
    non_negative,
    read_points,
    write_points,
)
from hpctrain.cost.machine import Link, Machine

RESULTS = Path(__file__).parents[2] / "perf/results"
TRUE = Machine(
    nodes=4,
    ranks_per_node=2,
    node=Link(3e-6, 4e9),
    network=Link(80e-6, 1.2e8),
    reduce_bytes_per_s=2e9,
    handle_bytes_per_s=1e9,
)
SHAPES = ((1, 2), (1, 4), (2, 2), (4, 2), (2, 4), (4, 1))
SIZES = tuple(4**k for k in range(5, 14))
WAYS = (("ring", 2, "none"), ("doubling", 2, "none"), ("halving", 0, "none"), ("ring", 2, "bf16"))


def made(noise=0.0, seed=0):
    """Return points of the machine ``TRUE``, with a log-normal error of spread ``noise``."""
    random = np.random.default_rng(seed)
    points = []
    for nodes, ranks in SHAPES:
        for name, rails, codec in WAYS:
            for num_bytes in SIZES:
                point = Point(
                    nodes=nodes,
                    ranks_per_node=ranks,
                    algorithm=name if nodes > 1 or not rails else "slices",
                    rails=rails,
                    codec=codec,
                    num_bytes=num_bytes,
                    seconds=1.0,
                )
                shape = replace(TRUE, nodes=nodes, ranks_per_node=ranks)
                seconds = allreduce(shape, num_bytes, point.spec).seconds(shape)
                points.append(replace(point, seconds=seconds * math.exp(random.normal(0, noise))))
    return points


def figures(machine):
    links = (machine.node, machine.network)
    rates = machine.reduce_bytes_per_s, machine.handle_bytes_per_s
    return [*(x for link in links for x in asdict(link).values()), *rates]


def test_exact_times_give_the_figures_back():
    found = fit(made())
    assert figures(found.machine()) == pytest.approx(figures(TRUE), rel=1e-6)
    assert found.held_out == pytest.approx(0, abs=1e-9)
    assert (found.machine().nodes, found.machine().ranks_per_node) == (4, 2)


def test_noise_moves_the_figures_and_the_stated_error_by_as_much():
    found = fit(made(noise=0.05))
    assert figures(found.machine())[1:4] == pytest.approx(figures(TRUE)[1:4], rel=0.2)
    assert found.held_out == pytest.approx(0.05 * 0.6745, rel=0.3)  # the median of a normal error


def test_a_tenth_of_wild_points_hardly_counts():
    points = made(noise=0.03)
    factor = {0: 8.0, 10: 0.2}
    wild = [replace(p, seconds=factor.get(k % 20, 1.0) * p.seconds) for k, p in enumerate(points)]
    found = fit(wild).machine()
    assert found.network.bytes_per_s == pytest.approx(TRUE.network.bytes_per_s, rel=0.1)
    assert found.network.latency_s == pytest.approx(TRUE.network.latency_s, rel=0.25)


def test_ranks_that_share_cores_are_slower_and_the_network_is_not():
    points = [replace(point, ranks_per_core=2.0) for point in made()[::3]]
    shared = [
        replace(p, seconds=p.load().seconds(replace(TRUE, ranks_per_core=2.0))) for p in points
    ]
    found = fit([*made(), *shared]).machine()
    assert figures(found) == pytest.approx(figures(TRUE), rel=1e-6)


def test_unmeasured_figures_keep_the_default_of_a_machine():
    on_a_node = [point for point in made() if point.nodes == 1 and point.spec.rails]
    machine = fit(on_a_node).machine()
    assert machine.network == Machine(nodes=1).network
    assert machine.node.latency_s == pytest.approx(TRUE.node.latency_s)


@given(
    st.integers(1, 4).flatmap(
        lambda columns: st.tuples(
            st.lists(
                st.lists(st.floats(-3, 3, width=16), min_size=columns, max_size=columns),
                min_size=columns + 2,
                max_size=8,
            ),
            st.integers(0, 2**16),
        )
    )
)
def test_no_other_non_negative_numbers_have_a_smaller_residual(case):
    rows, seed = case
    matrix, random = np.array(rows), np.random.default_rng(seed)
    target = random.normal(size=len(matrix))
    found = non_negative(matrix, target)
    assert (found >= 0).all()
    least = np.linalg.norm(matrix @ found - target)
    for _ in range(20):
        other = np.maximum(found + random.normal(size=len(found)) * random.choice([1e-3, 1]), 0)
        assert least <= np.linalg.norm(matrix @ other - target) + 1e-6


@pytest.mark.parametrize("rate", ["1gbit", "200mbit"])
def test_a_fit_to_half_of_the_sums_predicts_the_others_within_15_percent(rate):
    points = read_points(RESULTS / f"cost-{rate}.json")
    assert {(p.nodes, p.ranks_per_node) for p in points} == {(2, 2), (4, 2), (2, 4)}
    assert {p.codec for p in points} == {"none", "bf16"}
    assert {p.rails for p in points} == {0, 2}
    assert {p.num_bytes for p in points} == {4**k * 2**18 for k in range(5)}
    held_out = [fit(points, seed=seed).held_out for seed in range(5)]
    assert np.median(held_out) <= 0.15


def test_points_and_machines_survive_their_files(tmp_path):
    points = made(noise=0.1)[:7]
    write_points(tmp_path / "points.json", points, note="kept")
    assert read_points(tmp_path / "points.json") == points
    machine = replace(TRUE, nics=2, mtbf_s=1e6)
    (tmp_path / "machine.toml").write_text(render(machine))
    assert Machine.read(tmp_path / "machine.toml") == machine


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a JSON file with points"),
        ("[]", "must be a JSON file with points"),
        ('{"points": [3]}', "must be a mapping"),
        ('{"points": [{"nodes": 1}]}', "missing .* 'ranks_per_node'"),
        (json.dumps({"points": [asdict(made()[0]) | {"nodes": "1"}]}), "nodes must be an integer"),
        (json.dumps({"points": [asdict(made()[0]) | {"nodes": 0}]}), "must be "),
    ],
)
def test_a_file_without_points_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "wrong.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_points(tmp_path / "wrong.json")
    with pytest.raises(ConfigError, match="must be a JSON file with points"):
        read_points(tmp_path / "none.json")


def test_numbers_of_a_point_are_above_zero_and_a_fit_takes_several():
    values = asdict(made()[0])
    for wrong in ({"seconds": 0}, {"nodes": -1}):
        with pytest.raises(ConfigError, match="must be "):
            Point(**values | wrong)
    with pytest.raises(ConfigError, match="at least 6 points, got 5"):
        fit(made()[:5])


def test_the_command_shows_residuals_and_writes_a_machine(tmp_path):
    halves = made(noise=0.02)[::2], made(noise=0.02)[1::2]
    files = [tmp_path / f"{k}.json" for k in range(2)]
    for file, points in zip(files, halves, strict=True):
        write_points(file, points)
    line = ["bench", "fit", *map(str, files), "--out", str(tmp_path / "machine.toml")]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert "at points that the fit did not use" in result.output
    assert "halving, flat" in result.output
    machine = Machine.read(tmp_path / "machine.toml")
    assert machine.network.bytes_per_s == pytest.approx(1.2e8, rel=0.1)
    (tmp_path / "empty.json").write_text(json.dumps({"points": []}))
    assert CliRunner().invoke(app, ["bench", "fit", str(tmp_path / "empty.json")]).exit_code != 0
