"""Check that the table of ratios matches the stored results, and that regressions are reported."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.processes import ended

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "perf/table.py"
RESULTS = ROOT / "perf/results"


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("bench_table", SCRIPT)
    module = sys.modules["bench_table"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_table"]


def run(*words):
    line = [sys.executable, str(SCRIPT), *map(str, words)]
    return ended(line)


def changed(folder, factor, *, spread):
    """Copy the results of one benchmark, with all its ratios multiplied by a factor."""
    folder.mkdir()
    found = json.loads((RESULTS / "engines.json").read_text())
    for world in found["summary"]:
        world["ratios"] = {
            peer: [value * factor for value in (middle, middle / spread, middle * spread)]
            for peer, (middle, *_) in world["ratios"].items()
        }
    (folder / "engines.json").write_text(json.dumps(found))
    return folder


def test_page_of_figures_matches_the_stored_results(table):
    ratios, machines = table.read(RESULTS)
    assert table.markdown(ratios) in (ROOT / "perf/README.md").read_text()
    processors = {"AMD EPYC", "Intel(R) Xeon(R) Processor"}  # as that page says
    assert {*machines.values()} == {f"2 cores of {each}" for each in processors}


def test_every_ratio_is_within_its_spread_and_has_a_date(table):
    ratios, _ = table.read(RESULTS)
    assert len({ratio.key for ratio in ratios}) == len(ratios) > 100
    for ratio in ratios:
        least, most = ratio.bounds
        assert 0 < least <= ratio.value <= most, ratio
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", ratio.date)


def test_spread_uses_the_medians_of_the_rounds(table):
    peer, ours = [2.0, 2.0, 9.0, 6.0, 6.0, 0.1], [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert table.spread(peer, ours, rounds=2) == (2.0, 3.0)
    assert table.spread([2.0, 6.0], [1.0, 2.0], rounds=5) == (2.0, 3.0)  # of a quick run


@pytest.mark.parametrize(
    ("factor", "spread", "num_worse"),
    [(0.5, 1.1, 3), (0.5, 2.0, 0), (0.95, 1.1, 0), (2.0, 1.1, 0)],
    ids=["worse", "worse within noise", "a little worse", "better"],
)
def test_only_ratios_worse_beyond_both_spreads_count(table, tmp_path, factor, spread, num_worse):
    old, _ = table.read(changed(tmp_path / "old", 1.0, spread=1.1))
    new, _ = table.read(changed(tmp_path / "new", factor, spread=spread))
    assert len(table.worse(new, old)) == num_worse


def test_command_fails_and_reports_a_ratio_that_is_worse(tmp_path):
    old = changed(tmp_path / "old", 1.0, spread=1.1)
    new = changed(tmp_path / "new", 0.5, spread=1.1)
    done = run(new, "--against", old)
    assert done.returncode == 1
    assert "worse: training step, 2 ranks on one node, against Horovod, defaults:" in done.stdout
    assert "3 ratios compared, 3 worse beyond noise" in done.stdout
    assert run(old, "--against", RESULTS).returncode == 0
    shutil.rmtree(old)
    assert "no results of benchmarks in" in run(new, "--against", old).stderr


def test_all_benchmarks_of_make_bench_together_are_ended_within_15_minutes():
    text = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\n.PHONY")[0]
    limits = re.findall(r"call bench,(\d+),([\w-]+)", text)
    seconds = sum(int(limit) * (2 if name.endswith("-") else 1) for limit, name in limits)
    direct = re.findall(r"timeout -k 5 (\d+) python perf/bench_(\S+)", text)
    loop = re.search(r"for name in ([\w ]+); do", text)[1].split()
    seconds += sum(int(limit) * (len(loop) if "$" in name else 1) for limit, name in direct)
    assert len(limits) + len(direct) >= 10
    assert seconds <= 900


@pytest.mark.sweep
def test_the_benchmark_of_the_start_finds_the_functions_that_it_times():
    answer = ended([sys.executable, str(ROOT / "perf/bench_start.py"), "start"])
    assert {"plan", "named"} <= json.loads(answer.stdout.splitlines()[-1]).keys()
