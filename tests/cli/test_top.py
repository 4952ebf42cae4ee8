"""Check that ``hpctrain top`` reads the state of a job from the files of a run."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.core.errors import ConfigError
from hpctrain.launch import mpiexec
from hpctrain.launch.lease import BEAT, NAME, TIMES, Holder
from hpctrain.launch.slurm.scheduler import JOBS
from hpctrain.train.history import RunHistory
from hpctrain.train.watch import RunWatch
from tests.harness import preload
from tests.processes import hpctrain_without
from tests.train.starting import ROOT, write_config

STEP = {"epoch": 1, "lr": 0.1, "loss": 0.5, "samples_per_s": 160.0}
STARTED = {"event": "started", "world_size": 2, "num_steps": 40, "hosts": {"a": [0], "b": [1]}}


def top(*words):
    return CliRunner().invoke(app, ["top", *map(str, words)])


@pytest.fixture
def run(tmp_path):
    """Make the directory of a running job, with its first records."""
    write(tmp_path, STARTED, step(10, 0.1), step(20, 0.3))
    hold(tmp_path)
    times = {"compute_s": [0.1, 0.3], "communication_s": [0.2, 0.0], "input_s": [0.0, 0.0]}
    (tmp_path / "ranks.json").write_text(json.dumps({"step": 20, **times}))
    for name in ("step-00000010", "step-00000020", "step-00000020.aside"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    return tmp_path


def step(number, step_s):
    times = {"compute_s": step_s, "communication_s": 0.0, "input_s": 0.0}
    return {"event": "step", "step": number, **STEP, **times}


def write(folder, *records, mode="w"):
    with (folder / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def hold(folder, **changes):
    """Write a lease of this process; ``changes`` turn it into the lease of another process."""
    holder = replace(Holder.here(), **changes)
    (folder / NAME).write_text(json.dumps(asdict(holder)))
    beat = folder / f"lease-{holder.token}{BEAT}"
    beat.write_text("0\n")
    return beat


@pytest.mark.launches
def test_the_rank_that_others_wait_for_is_named_while_the_job_runs_and_after_it(tmp_path):
    write_config(tmp_path, "tests.train.problem:Late", epochs=15, every=4)
    run = tmp_path / "runs/small"
    words = [*preload.python(), "-m", "hpctrain", "train", str(tmp_path / "small.toml")]
    environ = mpiexec.environment() | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        mpiexec.command(words, num_ranks=2), cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL
    ) as job:
        while not (run / "ranks.json").exists():
            assert job.poll() is None
            time.sleep(0.05)
        watch = RunWatch(run)
        # The first steps may be slow on both ranks, and change the estimated time.
        while (view := watch.look()).slowest.rank != 1 or not 0 < (view.left_s or 0) < 60:
            assert job.poll() is None
            time.sleep(0.05)
        assert (view.life, view.has_ended, view.slowest.rank) == ("alive", False, 1)
        assert view.begun["num_steps"] == 60
        message = top(run, "--json", "--interval", 0.3).output.splitlines()  # until the end
        assert job.wait() == 0
    first, last = json.loads(message[0]), json.loads(message[-1])
    assert not first["has_ended"]
    assert last["has_ended"]
    later = watch.look()
    assert (later.status.state, later.step, later.life) == ("finished", 60, "none")
    late, early = later.ranks[1], later.ranks[0]
    assert late.compute_s > max(0.05, early.compute_s)
    assert early.communication_s > late.communication_s
    message = top(run).output
    assert "is finished: test accuracy" in " ".join(message.split())
    assert f"rank 1 on {late.host}, " in message
    assert late.slow >= 5 > early.slow
    assert f"rank 1 on {late.host}, persistent" in message
    (log,) = (run / "log").glob("*.log")
    assert log.read_text().count(f"rank 1 on {late.host} is slow in ") == 1
    assert json.loads((run / "ranks.json").read_text())["step"] == 60


def test_remaining_time_is_estimated_from_the_last_steps(run):
    view = RunWatch(run).look()
    assert view.left_s == pytest.approx(20 * 0.2)
    assert (view.slowest.rank, view.slowest.host) == (1, "b")
    message = top(run, "--once").output
    assert "20 of 40 (50%), epoch 1" in message
    assert "2, the last after step 20" in message
    assert "1 on b, 3.00 times" in message
    assert "the slowest 1 of 2 ranks" in top(run, "--ranks", 1).output


@pytest.mark.parametrize("tested", ["validation", "test"])
def test_the_last_test_is_labelled_by_its_samples(run, tested):
    test = {"event": "test", "step": 10, "metric": 0.5, "loss": 1.0}
    write(run, {**STARTED, "tested": tested}, step(10, 0.1), test)
    assert f"{tested} metric 0.5000, loss 1.0000" in " ".join(top(run, "--once").output.split())


def test_slow_ranks_are_found_by_how_often_they_were_slow(run):
    found = json.loads((run / "ranks.json").read_text())
    found |= {"checkpoint_s": [0.25, 0.5], "slow": [2, 7]}
    (run / "ranks.json").write_text(json.dumps(found))
    message = top(run, "--once").output
    assert "rank 1 on b, persistent; rank 0 on a, temporary" in message
    assert re.search(r"1.* b .* 500\.00 .* 3\.00 .*persistent", message)


def test_only_new_records_are_read_and_removed_records_are_dropped(run):
    watch = RunWatch(run)
    watch.look()
    with (run / "metrics.jsonl").open("r+") as file:
        file.write("[")  # in the part that was already read
    write(run, step(30, 0.3), mode="a")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')  # the rest of the line is not written yet
    view = watch.look()
    assert (view.step, view.begun) == (30, STARTED)
    assert view.step_s == pytest.approx(0.7 / 3)
    (run / "metrics.jsonl").unlink()
    write(run, STARTED, step(10, 0.1), {**STARTED, "event": "resumed", "step": 10, "part": 2})
    view = watch.look()
    assert (view.step, view.step_s) == (10, None)


def test_a_job_lives_as_long_as_its_heartbeat_changes(run, monkeypatch):
    watch, now = RunWatch(run), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert watch.look().life == "alive"
    now += TIMES.stale_s + 1
    assert watch.look().life == "silent"
    hold(run, token=Holder.read(run).token).write_text("17\n")
    assert watch.look().life == "alive"


def test_a_single_reading_uses_the_time_of_the_heartbeat(run):
    long_ago = time.time() - 100
    os.utime(hold(run), (long_ago, long_ago))
    printed = " ".join(top(run).output.split())
    assert re.search(r"has written no heartbeat for 1 min 4\d s", printed)


def test_top_does_not_wait_for_dead_or_finished_jobs(run):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        hold(run, pid=dead.pid)
    assert "but has ended" in " ".join(top(run).output.split())
    (run / NAME).unlink()
    message = " ".join(top(run, "--interval", 100).output.split())
    assert "ended without a last record after step 20" in message


def test_table_is_redrawn_on_a_terminal_until_interrupted(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    looks = iter([step(30, 0.1), step(40, 0.1)])

    def sleep(_):
        record = next(looks, None)
        if record is None:
            raise KeyboardInterrupt
        write(run, record, mode="a")

    monkeypatch.setattr(time, "sleep", sleep)
    found = top(run)
    assert found.exit_code == 0
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", found.output)
    assert re.findall(r"step +(\d+) of 40", shown)[:3] == ["20", "30", "40"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", "\0\0\0\n", "records of a run must be JSON objects"),
        ("ranks.json", "{", "remove the file"),
        ("ranks.json", '{"compute_s": [1], "communication_s": [], "input_s": []}', "one length"),
        ("ranks.json", "[]", "one length"),
    ],
)
def test_a_damaged_file_raises_with_a_remedy(run, name, text, message):
    (run / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        RunWatch(run).look()


def test_a_folder_without_a_run_raises_with_a_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist; .* pass the output_dir of a run"):
        RunWatch(tmp_path / "nothing").look()
    (tmp_path / JOBS).write_text("12\n")
    with pytest.raises(ConfigError, match="wait until its job has started, or read its output"):
        RunWatch(tmp_path).look()
    hold(tmp_path)  # a job that is about to start
    assert RunWatch(tmp_path).look().life == "alive"
    message = top(tmp_path).output
    assert "running: " in message
    assert "none is recorded yet" in message
    assert json.loads(top(tmp_path, "--json", "--once").output)["status"]["state"] == "running"
    with pytest.raises(ConfigError, match="wait until hpctrain top shows the first step"):
        RunHistory.read(tmp_path)


def test_a_run_is_watched_without_torch_and_mpi(run):
    assert hpctrain_without("torch mpi4py numpy", "top", run).returncode == 0
