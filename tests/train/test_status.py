"""What a batch script reads from a run's last record."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from hpctrain.cli.status import status as command
from hpctrain.runtime.stopping import STOPPED
from hpctrain.train.metrics import Metrics
from hpctrain.train.status import FAILED, status

STARTED = {"event": "started", "world_size": 2}
STEP = {"event": "step", "step": 7, "loss": 0.5}
STOP = {"event": "stopped", "step": 9, "reason": "SIGUSR1"}
RESUMED = {"event": "resumed", "step": 9}
FINISHED = {"event": "finished", "step": 12, "metric": 0.75, "metric_name": "accuracy"}


@pytest.fixture
def run(tmp_path):
    """Write a run's records."""

    def write(*records):
        with Metrics(tmp_path / "metrics.jsonl") as metrics:
            for record in records:
                metrics.write(**record)
        return tmp_path

    return write


def test_a_finished_run_is_0_and_tells_its_result(run):
    found = status(run(STARTED, STEP, FINISHED))
    assert (found.code, found.state) == (0, "finished")
    assert "finished: test accuracy 0.7500" in found.what


def test_a_result_that_is_not_finite_is_told(run):
    found = status(run(STARTED, STEP, FINISHED | {"metric": float("nan")}))
    assert (found.code, found.what.rpartition(": ")[2]) == (0, "test accuracy nan")


def test_a_stopped_run_is_85_and_tells_who_stopped_it(run):
    found = status(run(STARTED, STEP, STOP))
    assert (found.code, found.state) == (STOPPED, "stopped")
    assert "stopped by SIGUSR1 after step 9" in found.what


@pytest.mark.parametrize(
    ("records", "where"),
    [
        ([STARTED, STEP], "after step 7"),
        ([STARTED, STOP, RESUMED], "after step 9"),
        ([STARTED], "before its first step"),
        ([], "before its first step"),
    ],
)
def test_a_run_that_was_ended_without_a_word_is_1(run, records, where):
    found = status(run(*records))
    assert (found.code, found.state) == (FAILED, "unfinished")
    assert where in found.what


def test_a_folder_without_a_run_is_1(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        found = status(folder)
        assert (found.code, found.state) == (FAILED, "missing")


def test_a_record_cut_short_does_not_count(run):
    folder = run(STARTED, STOP)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "finis')
    assert status(folder).code == STOPPED


def test_what_is_no_record_does_not_count(run):
    folder = run(STARTED, STOP)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(bytes(60) + b"\n")
    assert status(folder).code == STOPPED


@pytest.mark.parametrize("content", [b"\0\0\0\n", b"nonsense\n", b"3\n", b"\xff\n"])
def test_a_file_that_holds_no_records_is_1_and_named(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    found = status(tmp_path)
    assert found.code == FAILED
    assert str(tmp_path / "metrics.jsonl") in found.what


def test_the_command_prints_one_line_and_ends_with_the_code(run):
    app = typer.Typer()
    app.command()(command)
    for records, code in (([STARTED, STOP], STOPPED), ([FINISHED], 0)):
        folder = run(*records)
        result = CliRunner().invoke(app, [str(folder)])
        assert (result.exit_code, result.stdout.count("\n")) == (code, 1)


def test_it_needs_neither_torch_nor_mpi():
    code = (
        "import sys\n"
        "for name in ('torch', 'mpi4py', 'numpy', 'h5py'): sys.modules[name] = None\n"
        "from pathlib import Path; from hpctrain.train.status import status\n"
        "sys.exit(status(Path('/nowhere')).code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == FAILED, done.stderr
