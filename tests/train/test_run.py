"""Complete runs of ``hpctrain train``, each in separate processes."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import hpctrain
from hpctrain.cli.main import app
from hpctrain.core.errors import ConfigError, MismatchError
from hpctrain.core.logs import file_in
from hpctrain.core.records import read
from hpctrain.launch.lease import Holder
from hpctrain.runtime.stopping import STOPPED
from hpctrain.train.load_config import load
from hpctrain.train.run import RunOptions, run
from hpctrain.train.run_directory import RunDirectory
from hpctrain.train.run_status import status
from tests.train import problem
from tests.train.job import newest_model
from tests.train.starting import last_line, start, write_config

pytestmark = pytest.mark.launches

TASK = """
import os
from tests.train import problem

class Model(type(problem.model())):
    def forward(self, x):
        import hpctrain
        self.broken -= self.training
        if not self.broken and hpctrain.rank() == 1:
            raise ValueError("no luck on this rank")
        if self.killed and hpctrain.rank() == 1:
            os.kill(os.getpid(), 9)
        return super().forward(x)

def model(broken=-1, killed=False):
    model = Model(*problem.model())
    model.broken, model.killed = broken, killed
    return model

def unlucky():
    raise ValueError("no model")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with a configuration and a module, in which a run starts."""
    (tmp_path / "task.py").write_text(TASK)
    write_config(tmp_path, "task:model", epochs=2, every=3, plots=True)
    return tmp_path


def train(folder, *more, **ranks):
    return start("-m", "hpctrain", "train", "small.toml", *more, cwd=folder, **ranks)


def test_a_run_writes_its_directory_and_prints_its_result(folder):
    done = train(folder, num_ranks=2, nodes=2)
    assert done.returncode == 0, done.stderr
    output = folder / "runs/small"
    records = read(output / "metrics.jsonl")
    assert last_line(done.stdout) == f"test accuracy {records[-1]['metric']:.4f}"
    for text in ("samples/s over all ranks", "node memory", "2 on 2 nodes"):
        assert text in done.stdout
    assert "\x1b" not in done.stdout
    assert "network adapters" not in done.stdout  # printed with --verbose only
    assert [records[0]["event"], records[-1]["event"]] == ["started", "finished"]
    assert (records[-1]["world_size"], records[-1]["nodes"]) == (2, 2)
    steps = [record for record in records if record["event"] == "step"]
    assert [record["step"] for record in steps] == [4, 8]
    assert all(record["compute_s"] > 0 and record["communication_s"] > 0 for record in steps)
    assert 'name = "small"' in (output / "config.toml").read_text()
    assert json.loads((output / "env.json").read_text())["command"]
    assert json.loads((output / "plan.json").read_text())["plan"]["num_rails"] >= 1
    assert newest_model(output)["step"] == 8
    assert (output / "plots/training.png").stat().st_size > 10_000


def test_a_dry_run_succeeds_and_used_or_unwritable_directories_are_rejected(
    folder, monkeypatch, capsys
):
    """Runs in this process, because one rank is enough."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    try:
        assert run(load(Path("small.toml")), {}, RunOptions(dry_run=True)) == 0
        message = capsys.readouterr().out
        for text in ("83 parameters", "8 steps, 2 epochs", "network adapters", "one rank"):
            assert text in message
        assert not (folder / "runs").exists()
        (folder / "file").touch()
        with pytest.raises(ConfigError, match=r"the run directory .*/file/out cannot be written"):
            run(load(Path("small.toml"), ["output_dir=file/out"]), {}, RunOptions())
        RunDirectory(Path("used")).create("", {}, {})
        Path("used", "metrics.jsonl").write_text('{"event": "test", "step": 1}\n')
        with pytest.raises(MismatchError, match="used already contains the results of a run"):
            run(load(Path("small.toml"), ["output_dir=used"]), {}, RunOptions())
        other = asdict(replace(Holder.here(), pid=1))
        Path("used", "lease.json").write_text(json.dumps(other))
        with pytest.raises(MismatchError, match=r"used is in use: process 1 on .* with --resume"):
            run(load(Path("small.toml"), ["output_dir=used"]), {}, RunOptions())
    finally:
        hpctrain.shutdown()
        sys.modules.pop("task", None)


def test_a_model_that_changes_the_working_directory_moves_no_file_of_the_run(folder, monkeypatch):
    """Runs in this process, because one rank is enough."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    with (folder / "task.py").open("a") as file:
        file.write(f"import os\nos.chdir({str(elsewhere)!r})\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    (folder / "first").mkdir()
    torch.save(problem.model().state_dict(), folder / "first/w.pt")
    try:
        loaded = load(Path("small.toml"), ["model.init_from=first/w.pt"])
        assert run(loaded, {}, RunOptions()) == 0
        assert Path.cwd() == elsewhere
    finally:
        hpctrain.shutdown()
        sys.modules.pop("task", None)
    # the data, which the module itself has written
    assert [path.name for path in elsewhere.iterdir()] == ["d"]
    output = folder / "runs/small"
    assert read(output / "metrics.jsonl")[-1]["event"] == "finished"
    assert newest_model(output)["step"] == 8
    assert (output / "plots/training.png").exists()


def test_a_stopped_run_writes_its_plot(folder, monkeypatch):
    """Runs in this process, because one rank is enough."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    directory = RunDirectory(Path("runs/small"))
    directory.path.mkdir(parents=True)
    directory.stop.touch()
    try:
        assert run(load(Path("small.toml"), ["train.epochs=9000"]), {}, RunOptions()) == STOPPED
    finally:
        hpctrain.shutdown()
        sys.modules.pop("task", None)
    assert directory.plot.stat().st_size > 10_000


def test_an_error_of_all_ranks_is_reported_once_with_its_exit_code(folder):
    done = train(folder, "--set=model.target=tests.train.problem:flawed_model", num_ranks=2)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("gradients must be finite, but they are not on rank") == 1
    assert "Traceback" not in done.stderr
    assert (folder / "runs/small/plots/training.png").stat().st_size > 10_000


def test_an_error_of_one_rank_ends_all_and_is_recorded(folder):
    done = train(folder, "--set", "model.args.broken=3", num_ranks=2)
    assert done.returncode not in (0, 2)
    assert "ValueError: no luck on this rank" in done.stderr
    log = file_in(folder / "runs/small/log", 1)
    assert "ValueError: no luck on this rank" in log.read_text()
    message = CliRunner().invoke(app, ["status", str(folder / "runs/small")])
    assert message.exit_code == 1
    assert "failed after step 2: rank 1: " in message.output
    assert "no luck on this rank" in message.output
    table = CliRunner().invoke(app, ["runs", str(folder / "runs")]).output.split()
    assert "failed" in table
    done = train(folder, num_ranks=2)
    assert done.returncode == 0, done.stderr
    records = read(folder / "runs/small/metrics.jsonl")
    assert (records[0]["part"], records[0]["ended_by"]) == (2, "an error")
    assert [record["event"] for record in records].count("failed") == 0


def test_an_error_before_the_model_is_built_is_recorded(folder):
    done = train(folder, "--set", "model.target=task:unlucky", num_ranks=3)
    assert done.returncode == 1, done.stderr
    assert read(folder / "runs/small/metrics.jsonl") == [
        {
            "event": "failed",
            "step": 0,
            "reason": "rank 0: ValueError: no model",
        }
    ]


def test_a_run_with_a_killed_rank_has_the_state_killed(folder):
    done = train(folder, "--set", "model.args.killed=true", num_ranks=2)
    assert done.returncode not in (0, 1, 2)
    assert status(folder / "runs/small").state == "killed"
    assert train(folder, "--resume", num_ranks=2).returncode == 0  # from the start
