"""Check the codes of ``hpctrain status`` for each state, with and without a queue."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.launch.lease import NAME, Holder
from hpctrain.launch.slurm.scheduler import JOBS
from hpctrain.train.run_status import CODES

STEP = {"event": "step", "step": 7}
FINISHED = {"event": "finished", "step": 12, "metric": 0.75, "metric_name": "accuracy"}


def status(*words):
    result = CliRunner().invoke(app, ["status", *map(str, words)])
    return result.exit_code, result.output.strip()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return the folder of a run, with commands of Slurm that print nothing."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "PE_HOSTFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    slurm(tmp_path, "")
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def slurm(folder, squeue):
    for name, body in (("sbatch", ""), ("squeue", squeue)):
        (folder / f"bin/{name}").write_text(f"#!/bin/sh\n{body}\n")
        (folder / f"bin/{name}").chmod(0o755)


def write(run, *records):
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def hold(run, **changes):
    (run / NAME).write_text(json.dumps(asdict(replace(Holder.here(), **changes))))


def test_every_state_has_a_separate_exit_code_that_the_help_lists(run):
    found = {}
    found["missing"] = status(run)
    hold(run)
    found["running"] = status(run)
    write(run, {"event": "started", "job": ""}, STEP)
    assert status(run)[0] == CODES["running"]
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        hold(run, pid=dead.pid)
    found["killed"] = status(run)
    (run / NAME).unlink()
    assert status(run)[0] == CODES["killed"]
    for end in ("failed", "stopped"):
        write(run, {"event": end, "step": 7, "reason": "SIGTERM"})
        found[end] = status(run)
    write(run, FINISHED)
    found["finished"] = status(run)
    assert {name: code for name, (code, _) in found.items()} | {"waiting": 3} == CODES
    assert "is running" in found["running"][1]
    assert "without a last record after step 7" in found["killed"][1]
    assert "that job is dead" in found["killed"][1]
    message = CliRunner().invoke(app, ["status", "--help"]).output
    for code in CODES.values():
        assert f" {code} " in message


def test_the_queue_reports_since_when_and_until_when_a_job_waits(run):
    (run / JOBS).write_text("12\n")
    when = "2026-11-25T07:00:00 2026-11-25T10:00:00"
    slurm(run.parent, f"echo 12 12 PENDING {when} Priority")
    code, message = status(run)
    assert code == CODES["waiting"]
    assert message.startswith(f"{run}: job 12 is PENDING, Priority, since 2026-11-25T07:00:00, ")
    assert message.endswith("expected to start 2026-11-25T10:00:00")
    write(run, {"event": "started", "job": "12"}, STEP)
    assert status(run)[1].startswith(f"{run}: job 12 is PENDING again, Priority")
    slurm(run.parent, f"echo 12 12 RUNNING {when} None")
    assert status(run)[0] == CODES["running"]
    slurm(run.parent, "exit 1")  # without an answer of Slurm, the records decide
    assert status(run)[0] == CODES["killed"]


def test_a_job_that_submit_has_not_sent_is_known_by_the_records(run):
    write(run, {"event": "started", "job": "17"}, STEP)
    slurm(run.parent, "echo 17 17 RUNNING N/A N/A None")
    assert status(run)[0] == CODES["running"]


def test_watch_prints_each_change_and_returns_the_final_code(run):
    (run / JOBS).write_text("12\n")
    turns = run.parent / "turns"
    slurm(
        run.parent,
        f"echo >> {turns}; n=$(wc -l < {turns})\n"
        f"test $n -gt 4 && echo '{json.dumps(FINISHED)}' >> {run}/metrics.jsonl\n"
        "test $n -le 2 && echo 12 12 PENDING N/A N/A Priority\n"
        "test $n -gt 2 && echo 12 12 RUNNING N/A N/A None; true",
    )
    code, message = status(run, "--watch", "--interval", "0.1")
    assert code == 0
    states = ("job 12 is PENDING, Priority", "job 12 is RUNNING", "is finished")
    lines = message.splitlines()
    assert len(lines) == len(states)
    for line, state in zip(lines, states, strict=True):
        assert state in line
