"""Content of a run directory and of its records."""

import json
import subprocess
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.cluster.env import STOPPED, STOPPING
from hpctrain.core.errors import ConfigError
from hpctrain.core.provenance import project
from hpctrain.core.records import read
from hpctrain.train.attempts import KILLED, RunPart
from hpctrain.train.metrics import Metrics, cut
from hpctrain.train.run import requests_of
from hpctrain.train.run_config import RunConfig
from hpctrain.train.run_directory import RunDirectory, environment
from hpctrain.train.run_status import status


def test_a_new_directory_has_all_its_parts(tmp_path):
    directory = RunDirectory(tmp_path / "a" / "b")
    directory.create("seed = 1\n", environment(), {"plan": {"rails": 1}})
    assert {path.name for path in directory.path.iterdir()} == {
        "config.toml", "env.json", "plan.json", "log", "checkpoints", "plots",
    }  # fmt: skip
    assert directory.config.read_text() == "seed = 1\n"
    assert json.loads(directory.plan.read_text()) == {"plan": {"rails": 1}}
    facts = json.loads(directory.environment.read_text())
    assert facts["torch"]
    assert facts["command"]


def test_the_environment_file_has_code_machine_and_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    variables = {
        "JOB_ID": 17,
        "RESTART_COUNT": 2,
        "JOB_PARTITION": "gpu",
        "JOB_NODELIST": "n[1-2]",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("LOADEDMODULES", "gcc/13:openmpi/5.0")
    facts = environment("Open MPI v5.0.11")
    assert (facts["mpi"], facts["project"]) == ("Open MPI v5.0.11", {})
    assert facts["job"] == {"id": "17", "restarts": 2, "partition": "gpu", "nodelist": "n[1-2]"}
    assert facts["modules"] == ["gcc/13", "openmpi/5.0"]
    assert facts["cpu"]
    assert json.loads(json.dumps(facts)) == facts


def test_the_environment_file_has_the_commit_and_changed_files(tmp_path):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "model.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "a")
    clean = project(tmp_path)
    assert list(clean) == ["commit"]
    hashes = set()
    for text in ("2", "3"):
        (tmp_path / "model.py").write_text(text)
        found = project(tmp_path)
        assert (found["commit"], found["changed"]) == (clean["commit"], ["model.py"])
        hashes.add(found["diff"])
    assert len(hashes) == 2
    (tmp_path / "model.py").write_text("1")
    assert project(tmp_path) == clean


@pytest.mark.parametrize("trace", ["test", "finished", "checkpoint"])
def test_a_directory_with_results_is_rejected_and_not_changed(tmp_path, trace):
    directory = RunDirectory(tmp_path / "a")
    directory.make_log_folder()
    (directory.logs / "host.log").touch()
    directory.create("seed = 0\n", {}, {})
    # a directory with logs only, or with a run without results, may be replaced
    for step in (0, 3):
        with Metrics(directory.metrics) as metrics:
            metrics.write("started")
            metrics.write("step", step=step)
            metrics.write("failed", step=step, reason="no luck")
        directory.create("seed = 1\n", {}, {})
        assert not directory.metrics.exists()
    if trace == "checkpoint":
        (directory.checkpoints / "step-00000001").mkdir()
    else:
        directory.metrics.write_text(f'{{"event": "{trace}", "step": 1, "reason": ""}}\n')
    with pytest.raises(ConfigError, match="--set output_dir="):
        directory.create("seed = 2\n", {}, {})
    assert directory.config.read_text() == "seed = 1\n"
    with pytest.raises(ConfigError, match=r"cannot be written: .*--set output_dir="):
        RunDirectory(directory.config).create("", {}, {})  # a file, not a directory


def test_records_can_be_read_as_soon_as_they_are_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(None) as metrics:
        metrics.write("step", step=1)
    assert list(tmp_path.iterdir()) == []
    with Metrics(path) as metrics:
        metrics.write("step", step=1, loss=0.5)
        assert read(path) == [{"event": "step", "step": 1, "loss": 0.5}]
        metrics.write("step", step=2, loss=float("inf"))
        assert read(path)[-1] == {"event": "step", "step": 2, "loss": None}
    with path.open("a") as file:
        file.write('{"event": "st')  # truncated line
    assert len(read(path)) == 2


def line(step: int) -> bytes:
    return json.dumps({"event": "step", "step": step}).encode() + b"\n"


@pytest.mark.parametrize("damage", [bytes(9), b"\xff\xfe", b"{", b"3", b"{}", b""], ids=repr)
def test_an_invalid_line_is_reported_and_only_that_line_is_omitted(tmp_path, caplog, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + damage + b"\n" + line(2) + line(3))
    assert [record["step"] for record in read(path)] == [1, 2, 3]
    cut(path, 4, 3)
    assert path.read_bytes() == line(1) + line(2) + line(3)
    assert f"1 of 4 lines of {path} are not records" in caplog.text
    assert ": 2; these lines are removed" in caplog.text


def test_records_joined_by_zeros_are_not_kept_if_they_will_be_repeated(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2)[:9] + b"\0" * 60 + line(3)[9:] + line(4) + line(5) + b"\0")
    cut(path, 4, 4)  # as after a checkpoint of step 4 that counted four records
    assert [record["step"] for record in read(path)] == [1, 4]


def test_an_undamaged_file_is_cut_without_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2) + line(3)[:5])
    cut(path, 1, 1)
    assert path.read_bytes() == line(1)
    assert not caplog.text


STARTED = {"event": "started", "world_size": 2}
STEP = {"event": "step", "step": 7, "loss": 0.5}
UNBEGUN = {"event": "failed", "step": 0, "reason": "KeyError: 'width'"}
STOP = {"event": "stopped", "step": 9, "reason": "SIGUSR1"}
RESUMED = {"event": "resumed", "step": 9}
FINISHED = {"event": "finished", "step": 12, "metric": 0.75, "metric_name": "accuracy"}
FAILURE = {"event": "failed", "step": 3, "reason": "loss and gradients must be finite"}


@pytest.mark.parametrize(
    ("records", "state", "code", "output"),
    [
        ([STARTED, STEP, FINISHED], "finished", 0, "finished: test accuracy 0.7500"),
        ([FINISHED | {"metric": float("nan")}], "finished", 0, "test accuracy nan"),
        ([STARTED, STEP, STOP], "stopped", STOPPED, "stopped by SIGUSR1 after step 9"),
        ([STARTED, FAILURE], "failed", 1, "failed after step 3: loss and gradients"),
        ([UNBEGUN], "failed", 1, "failed before its first step: KeyError: 'width'"),
        ([STARTED, STEP], "killed", 5, "after step 7"),
        ([STARTED, STOP, RESUMED], "killed", 5, "after step 9"),
        ([STARTED], "killed", 5, "before its first step"),
        ([], "killed", 5, "before its first step"),
    ],
)
def test_the_last_record_determines_the_status_of_a_run(tmp_path, records, state, code, output):
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        for record in records:
            metrics.write(**record)
    found = status(tmp_path)
    assert (found.state, found.code) == (state, code)
    assert output in found.what
    result = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (code, f"{found.what}\n")


def test_the_exit_code_of_the_last_job_determines_the_status_of_a_program(tmp_path):
    found = []
    for code in (None, "begun", "0", "3", "85", "137"):
        if code:
            (tmp_path / "exit_code").write_text(f"{code}\n")
        found.append(status(tmp_path).state)
    assert found == ["missing", "killed", "finished", "failed", "stopped", "failed"]
    (tmp_path / STOPPING).touch()  # srun kills ranks that end later than the first one
    assert status(tmp_path).state == "stopped"


@pytest.mark.parametrize("damage", [b'{"event": "finis', bytes(60) + b"\n"])
def test_damaged_records_are_ignored(tmp_path, damage):
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(**STOP)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(damage)
    assert status(tmp_path).code == STOPPED


def test_folders_without_a_run_or_without_records_have_separate_exit_codes(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert (status(folder).code, status(folder).state) == (6, "missing")
    for content in (b"\0\0\0\n", b"nonsense\n", b"3\n", b"\xff\n"):
        (tmp_path / "metrics.jsonl").write_bytes(content)
        assert status(tmp_path).code == 5
        assert str(tmp_path / "metrics.jsonl") in status(tmp_path).what


FIRST = {"event": "started", "part": 1}
BUDGET = {"event": "stopped", "step": 4, "reason": "SIGUSR1, budget"}


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("records", "part", "ended_by"),
    [
        ([], 1, None),
        ([FIRST, STEP, BUDGET], 2, "SIGUSR1, budget"),
        ([FIRST, STEP], 2, KILLED),
        ([FIRST], 2, KILLED),
        ([FIRST, {"event": "failed"}], 2, "an error"),
        ([FIRST, BUDGET, {"event": "resumed", "part": 2}, STEP], 3, KILLED),
        # records of versions that did not count parts
        ([{"event": "started"}, BUDGET], 2, "SIGUSR1, budget"),
    ],
)
def test_a_part_has_its_number_and_the_reason_of_the_previous_end(records, part, ended_by):
    found = RunPart.after(records)
    assert found == RunPart(part=part, ended_by=ended_by, job="17", restarts=2)
    if ended_by is None:
        return  # the first part has no description
    text = found.describe()
    assert text.startswith(f"part {part} of the run in job 17, restart 2: the previous part ")
    assert text.endswith(
        "without a last record" if ended_by == KILLED else f"stopped by {ended_by}"
    )


def stop_of(tmp_path, rank):
    return requests_of(RunConfig(), RunDirectory(tmp_path), 1000.0, SimpleNamespace(rank=rank))


@pytest.mark.usefixtures("job")
def test_only_rank_0_queries_the_end_of_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000")
    assert stop_of(tmp_path, 0).reason == "budget"  # this time has passed
    assert not stop_of(tmp_path, 1).reason


@pytest.mark.usefixtures("job")
def test_a_run_without_an_answer_of_slurm_trains_and_warns(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not stop_of(tmp_path, 0).reason
    assert "cannot stop by itself before its job ends" in caplog.text
