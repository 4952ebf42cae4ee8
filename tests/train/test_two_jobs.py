"""Two jobs in one run directory: only one job writes, and its files stay consistent.

By default two jobs overlap once, at a random time; in ``make conformance``, three more times.
``TEST_OVERLAPS=50`` sets the number to 50.
"""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

import hpctrain
from hpctrain.checkpoint.loading import check
from hpctrain.cluster.env import STOPPED
from hpctrain.core.errors import MismatchError
from hpctrain.core.records import read
from hpctrain.launch import mpiexec
from hpctrain.launch.lease import NAME, Holder
from hpctrain.train.load_config import load
from hpctrain.train.run import RunOptions, run
from hpctrain.train.run_status import status
from hpctrain.train.step_exchange import StepExchange
from tests.harness import preload
from tests.harness.pace import scaled
from tests.slurm import training
from tests.train.starting import ROOT

OVERLAPS = int(os.environ.get("TEST_OVERLAPS", "4"))
LONG = () if "TEST_OVERLAPS" in os.environ else pytest.mark.conformance
EVENTS = ("is forced out", "is killed", "stops", "ends")
"""Events of the first job while the second one waits."""

SLOW = """
import os
from tests.slurm import training

def model():
    return training.model(float(os.environ["STEP_S"]))
"""
"""A model whose pace is not in the configuration, so that two jobs of a run may differ in it."""

pytestmark = pytest.mark.launches


class Folder:
    """A run directory, and jobs that are started in it."""

    def __init__(self, path):
        self.config, self.run = training.write(path), path / "run"
        (path / "slow_model.py").write_text(SLOW)
        self._env = mpiexec.environment() | {
            "PYTHONPATH": f"{ROOT}:{path}",
            "HPCTRAIN_PROBE": "off",
        }

    @contextmanager
    def job(self, *options, ranks=None, step_s=0.05, before=()):
        """Start a job, and end it after the block."""
        # with a preloaded Python the job would be a child of its server, outside the namespace
        python = [sys.executable] if before else preload.python()
        line = [*python, "-m", "hpctrain", "train", str(self.config), *options]
        line += ["--set", "model.target=slow_model:model"]
        if ranks:
            line = mpiexec.command(line, num_ranks=ranks)
        job = subprocess.Popen(
            [*before, *line],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._env | {"STEP_S": str(step_s)},
            start_new_session=True,
        )
        try:
            yield job
        finally:
            if job.poll() is None:
                job.kill()
            job.wait()
            job.stdout.close()

    def records(self, *events):
        path = self.run / "metrics.jsonl"
        return [r for r in read(path) if r["event"] in events] if path.exists() else []

    def wait_for_step(self, step, job):
        """Wait until the run has reached a step."""
        while not any(r["step"] >= step for r in self.records("step")):
            assert job.poll() is None, job.communicate()
            time.sleep(0.02)

    def check_whole(self):
        """Check that records have every step once, in order, and that checkpoints are valid."""
        lines = (self.run / "metrics.jsonl").read_bytes().splitlines()
        assert len(read(self.run / "metrics.jsonl")) == len(lines)
        steps = [record["step"] for record in self.records("step")]
        assert steps == list(range(1, len(steps) + 1))
        for path in (self.run / "checkpoints").glob("step-????????"):
            assert check(path) == []

    def check_finished(self):
        """Check that the run has finished and contains no temporary files of its jobs."""
        assert status(self.run).state == "finished"
        self.check_whole()
        assert self.records("step")[-1]["step"] == training.STEPS
        names = [path.name for path in self.run.rglob("*")]
        assert not [n for n in names if n.startswith("lease") or n.endswith(".part")]


def output(job):
    """Return the output of a job until its end, as one line."""
    text = job.stdout.read()
    job.wait()
    return " ".join(text.split())


@pytest.mark.limit(60 + 30 * OVERLAPS)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=LONG if seed else ()) for seed in range(OVERLAPS)]
)
def test_two_overlapping_jobs_leave_one_consistent_run(tmp_path, seed):
    random_, event = random.Random(seed), EVENTS[seed % len(EVENTS)]
    folder, is_forced = Folder(tmp_path), event == "is forced out"
    pace = {"ends": 0.5}.get(event, 1.0)
    with folder.job(ranks=2 if is_forced else None, step_s=pace) as first:
        folder.wait_for_step(1, first)
        holder = Holder.read(folder.run)
        with folder.job(*(("--resume", "--force") if is_forced else ())) as second:
            line = second.stdout.readline()  # the first line shows that the second job has started
            assert first.poll() is None
            time.sleep(random_.uniform(0, 2))
            if event == "is killed":
                os.kill(holder.pid, signal.SIGKILL)
            elif event == "stops":
                first.send_signal(signal.SIGUSR1)
            before = time.monotonic()
            printed = f"{' '.join(line.split())} {output(second)}"
            assert second.returncode == 0, printed
            assert is_forced or time.monotonic() - before < scaled(60)
        message = output(first)
    folder.check_finished()
    if is_forced:
        assert first.returncode == 2, message
        assert len(re.findall(r"process \d+ on .* has taken the lease", message)) == 1
        assert "Traceback" not in message
        assert re.search(
            rf"--force takes .*process {holder.pid} on .* are lost; the last", printed
        )
    elif event == "is killed":
        assert first.returncode == -signal.SIGKILL, message
    else:  # no work of the first job is lost
        assert first.returncode == (STOPPED if event == "stops" else 0), message
        ends = [record["ended_by"] for record in folder.records("resumed")]
        assert ends == (["SIGUSR1"] if event == "stops" else [])


def test_a_job_that_loses_its_lease_at_its_last_record_fails(tmp_path, monkeypatch):
    folder = Folder(tmp_path)

    original = StepExchange.hash

    def taken(exchange):
        (folder.run / NAME).unlink()
        return original(exchange)

    monkeypatch.setattr(StepExchange, "hash", taken)  # called for the last record
    try:
        with pytest.raises(MismatchError, match=r"lease\.json of this job is missing"):
            run(load(folder.config, ["train.epochs=1"]), {}, RunOptions())
    finally:
        hpctrain.shutdown()


@pytest.mark.limit(300)
@pytest.mark.conformance
def test_a_second_job_waits_and_then_fails_with_the_name_of_the_first(tmp_path):
    folder = Folder(tmp_path)
    with folder.job(ranks=2, step_s=4.0) as first:
        folder.wait_for_step(1, first)
        holder = Holder.read(folder.run)
        assert f"process {holder.pid}" in status(folder.run).what
        with folder.job() as second:
            printed = output(second)
        assert second.returncode == 2
        assert f"{holder.describe()} still writes to it after 6" in printed
        first.send_signal(signal.SIGUSR1)
        assert first.wait(60) == STOPPED
    folder.check_whole()
    assert not (folder.run / NAME).exists()


@pytest.mark.limit(300)
@pytest.mark.conformance
def test_a_second_job_takes_over_after_the_kill_of_a_job_in_another_namespace(tmp_path):
    """Each job is in its own PID namespace, as on two hosts: only the heartbeat shows the kill."""
    apart = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    folder = Folder(tmp_path)
    with folder.job(before=apart, step_s=0.4) as first:
        folder.wait_for_step(6, first)
        with folder.job(before=apart) as second:
            time.sleep(random.Random(1).uniform(0, 20))
            assert second.poll() is None
            first.kill()
            killed = time.monotonic()
            resumed = itertools.takewhile(
                lambda _: not folder.records("resumed"), iter(lambda: time.sleep(0.1), 1)
            )
            assert all(time.monotonic() - killed < scaled(60) for _ in resumed)
            printed = output(second)
    assert second.returncode == 0, printed
    folder.check_finished()
