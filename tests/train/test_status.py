"""What a batch script reads from a run's last record."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.runtime.stopping import STOPPED
from hpctrain.train.metrics import Metrics
from hpctrain.train.status import FAILED, status

STARTED = {"event": "started", "world_size": 2}
STEP = {"event": "step", "step": 7, "loss": 0.5}
STOP = {"event": "stopped", "step": 9, "reason": "SIGUSR1"}
RESUMED = {"event": "resumed", "step": 9}
FINISHED = {"event": "finished", "step": 12, "metric": 0.75, "metric_name": "accuracy"}
FAILURE = {"event": "failed", "step": 3, "reason": "loss and gradients must be finite"}


@pytest.mark.parametrize(
    ("records", "state", "code", "told"),
    [
        ([STARTED, STEP, FINISHED], "finished", 0, "finished: test accuracy 0.7500"),
        ([FINISHED | {"metric": float("nan")}], "finished", 0, "test accuracy nan"),
        ([STARTED, STEP, STOP], "stopped", STOPPED, "stopped by SIGUSR1 after step 9"),
        ([STARTED, FAILURE], "failed", FAILED, "failed after step 3: loss and gradients"),
        ([STARTED, STEP], "unfinished", FAILED, "after step 7"),
        ([STARTED, STOP, RESUMED], "unfinished", FAILED, "after step 9"),
        ([STARTED], "unfinished", FAILED, "before its first step"),
        ([], "unfinished", FAILED, "before its first step"),
    ],
)
def test_the_last_record_says_how_a_run_stands(tmp_path, records, state, code, told):
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        for record in records:
            metrics.write(**record)
    found = status(tmp_path)
    assert (found.state, found.code) == (state, code)
    assert told in found.what
    result = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (code, f"{found.what}\n")


@pytest.mark.parametrize("damage", [b'{"event": "finis', bytes(60) + b"\n"])
def test_what_is_no_record_does_not_count(tmp_path, damage):
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(**STOP)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(damage)
    assert status(tmp_path).code == STOPPED


def test_a_folder_without_a_run_or_without_records_is_1(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert (status(folder).code, status(folder).state) == (FAILED, "missing")
    for content in (b"\0\0\0\n", b"nonsense\n", b"3\n", b"\xff\n"):
        (tmp_path / "metrics.jsonl").write_bytes(content)
        assert status(tmp_path).code == FAILED
        assert str(tmp_path / "metrics.jsonl") in status(tmp_path).what


def test_it_needs_neither_torch_nor_mpi():
    code = (
        "import sys\n"
        "for name in ('torch', 'mpi4py', 'numpy', 'h5py'): sys.modules[name] = None\n"
        "from pathlib import Path; from hpctrain.train.status import status\n"
        "sys.exit(status(Path('/nowhere')).code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == FAILED, done.stderr
