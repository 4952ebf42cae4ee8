"""Check the verdict over all ranks and the closing table."""

import os

import pytest

from tests import report
from tests.harness.journal import append
from tests.harness.verdict import Verdict, disagreement


def test_verdicts_differ_when_any_rank_differs():
    good, skip, bad = (Verdict(outcome, outcome) for outcome in ("passed", "skipped", "failed"))
    assert disagreement([good, good]) == ""
    assert disagreement([skip, skip]) == ""
    assert disagreement([bad, bad]) == ""
    assert disagreement([good, skip]) == "skipped on some ranks only: rank 1: skipped"
    assert disagreement([skip, bad, good]) == "failed on some ranks only: rank 1: failed"


@pytest.fixture
def reports(tmp_path):
    def write(name: str, *outcomes: str, code: int = 0, ranks: int = 0, not_run: int = 0) -> str:
        tests = [
            {"test": f"t.py::test_{i}", "outcome": outcome, "reason": "why", "seconds": float(i)}
            for i, outcome in enumerate(outcomes)
        ]
        mpi = {"openmpi": "Open MPI v5.0.11", "mpich": "MPICH Version: 5.0.2"}[name[:-2]]
        facts = {"mpi": mpi, "ranks": ranks or int(name[-1])}
        collected = {"collected": len(tests) + not_run}
        append(tmp_path / f"{name}.jsonl", facts, collected, *tests)
        (tmp_path / f"{name}.rc").write_text(str(code))
        return name

    return write


def test_the_closing_table_ends_with_the_sums_alone(tmp_path, reports, capsys):
    names = [
        reports("openmpi-1", "passed", "skipped"),
        reports("mpich-2", "passed", "failed", code=1),
    ]
    assert report.main(str(tmp_path), *names) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 passed, 1 failed, 1 skipped"
    assert "  t.py::test_1: why [openmpi-1]" in lines
    assert "  t.py::test_1: why [mpich-2]" in lines


@pytest.mark.parametrize(("code", "ranks"), [(0, 1), (139, 2), (5, 2)])
def test_a_launch_that_broke_outside_of_its_tests_fails_the_run(
    tmp_path, reports, code, ranks, capsys
):
    name = reports("openmpi-2", "passed", code=code, ranks=ranks)
    assert report.main(str(tmp_path), name) == 1
    assert capsys.readouterr().out.endswith("\n1 passed, 1 failed, 0 skipped\n")


def test_tests_that_did_not_run_are_counted_and_fail_the_run(tmp_path, reports, capsys):
    assert report.main(str(tmp_path), reports("openmpi-2", "passed", not_run=7)) == 1
    row = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("openmpi-2"))
    assert row.split()[:5] == ["openmpi-2", "1", "0", "0", "7"]


def test_end_of_the_report_shows_the_fault_of_a_launch_outside_of_its_tests(tmp_path, capsys):
    lines = ["[rank 1] t.py::test_x still runs after 60 s", *map(str, range(99)), "the end"]
    (tmp_path / "openmpi-2.log").write_text("\n".join(lines))
    assert report.main(str(tmp_path), "openmpi-2") == 1
    output = capsys.readouterr().out.splitlines()
    assert f"  {lines[0]}" in output
    assert output[-3:] == ["  the end", "", "0 passed, 1 failed, 0 skipped"]


def test_a_launch_without_report_fails_the_run(tmp_path, capsys):
    assert report.main(str(tmp_path), "openmpi-3") == 1
    assert "no report" in capsys.readouterr().out


@pytest.mark.parametrize(("require", "code"), [("", 0), ("slurm,mpich", 1)])
def test_skipped_launch_is_a_skip_unless_required(tmp_path, monkeypatch, require, code):
    monkeypatch.setitem(os.environ, "HPCTRAIN_REQUIRE", require)
    (tmp_path / "mpich-2.skipped").write_text("MPICH could not be installed")
    assert report.main(str(tmp_path), "mpich-2") == code
