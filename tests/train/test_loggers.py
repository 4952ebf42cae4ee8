"""Loggers get the records of metrics.jsonl on rank 0 only, and cannot affect the run."""

import csv
import json
import sys
from types import SimpleNamespace

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.core.records import read
from hpctrain.train.loggers import CsvLogger, Loggers, check, factory, scalars
from hpctrain.train.metrics import Metrics
from tests.train.job import Job


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Heard:
    """A user-defined logger that stores all records."""

    of: list["Heard"] = []  # noqa: RUF012 - emptied by each test

    def __init__(self, folder, config):
        self.folder, self.config, self.records, self.is_closed = folder, config, [], False
        Heard.of.append(self)

    def write(self, record):
        self.records.append(record)

    def close(self):
        self.is_closed = True


def fails_at_once(*_):
    raise RuntimeError("no server")


def fails_later(*_):
    def write(record):
        raise SystemExit(record["event"])

    return SimpleNamespace(write=write, close=lambda: None)


NAME = "tests.train.test_loggers"


def log(*names):
    found = [name[1:] if name[0] == "=" else f"{NAME}:{name}" for name in names]
    return f"log.to={json.dumps(found)}"


@pytest.mark.ranks(1, 2)
def test_a_logger_gets_all_records_on_rank_0_and_a_failing_one_is_disabled(
    here, shared, configure, caplog
):
    Heard.of.clear()
    names = log("Heard", "fails_at_once", "fails_later", "=csv")
    job = Job(here, configure, shared / "run", names, "train.epochs=2")
    job.part()
    plain = Job(here, configure, shared / "plain", "train.epochs=2")
    plain.part()
    assert job.curve() == plain.curve()
    if here.comm.rank:
        assert (Heard.of, caplog.text) == ([], "")
        return
    [heard] = Heard.of
    assert json.loads(json.dumps(heard.records)) == read(job.directory.metrics)
    assert heard.is_closed
    assert (heard.folder, heard.config["train"]["epochs"]) == (job.directory.path, 2)
    for name, why in (("fails_at_once", "RuntimeError: no server"), ("fails_later", "started")):
        output = [line for line in caplog.messages if f":{name}" in line]
        assert len(output) == 1
        assert "is disabled, and the run continues" in output[0]
        assert why in output[0]


@pytest.mark.ranks(1)
def test_csv_tables_of_a_resumed_run_have_each_step_once(here, shared, configure):
    job = Job(here, configure, shared / "run", log("=csv"), "checkpoint.every=4")
    job.part(stop="SIGTERM", after=9)
    job.part()
    found = rows(job.directory.path / "csv/step.csv")
    steps = [each for each in read(job.directory.metrics) if each["event"] == "step"]
    assert [row["step"] for row in found] == [str(each["step"]) for each in steps]
    assert [float(row["loss"]) for row in found] == [each["loss"] for each in steps]
    assert len(rows(job.directory.path / "csv/test.csv")) == 4


def test_csv_tables_accept_new_columns_and_values_that_are_not_finite(tmp_path):
    loggers = Loggers(["csv"], tmp_path, {})
    with Metrics(tmp_path / "metrics.jsonl", loggers=loggers) as metrics:
        metrics.write("started")
        metrics.write("step", step=1, loss=float("nan"))
        metrics.write("step", step=2, loss=1.0, skipped=3)
        metrics.write("step", step=3, loss=2.0)
    assert rows(tmp_path / "csv/step.csv") == [
        {"step": "1", "loss": "", "skipped": ""},
        {"step": "2", "loss": "1.0", "skipped": "3"},
        {"step": "3", "loss": "2.0", "skipped": ""},
    ]


def test_names_of_values_have_their_event_as_prefix():
    record = {"event": "test", "step": 3, "epoch": 1, "loss": 0.5, "metrics": {"f1": 1, "n": None}}
    assert scalars(record) == {"test/loss": 0.5, "test/metrics.f1": 1.0}
    assert scalars({"event": "step", "step": 1, "lr": 0.1, "label": "x"}) == {"train/lr": 0.1}
    assert scalars({"event": "checkpoint", "step": 1}) == {}


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("tensorbord", "did you mean tensorboard?"),
        ("no.such:Logger", "there is no module no"),
        ("tests.train.test_loggers:Hear", "did you mean Heard?"),
    ],
)
def test_an_unknown_logger_is_an_error_before_the_run(name, output):
    with pytest.raises(ConfigError, match=output.replace("?", r"\?")):
        check(["csv", name])


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_an_error_with_the_command_to_install_it(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"pip install 'hpctrain\[{name}\]'"):
        check([name])


def test_a_module_that_cannot_be_imported_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "broken_logger.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match="cannot be imported: ZeroDivisionError"):
        factory("broken_logger:Logger")
    assert factory("csv") is CsvLogger


@pytest.mark.requires("tensorboard")
def test_tensorboard_reads_the_values_of_all_parts(here, shared, configure):
    from tensorboard.backend.event_processing.event_accumulator import (  # noqa: PLC0415 - where it is
        EventAccumulator,
    )

    job = Job(here, configure, shared / "run", log("=tensorboard"), "checkpoint.every=4")
    job.part(stop="SIGTERM", after=9)
    job.part()
    found = EventAccumulator(str(job.directory.path / "tensorboard"))
    found.Reload()
    steps = [each for each in read(job.directory.metrics) if each["event"] == "step"]
    shown = [(each.step, each.value) for each in found.Scalars("train/loss")]
    assert shown == [(each["step"], pytest.approx(each["loss"])) for each in steps]
    assert len(found.Scalars("test/metric")) == 4


@pytest.mark.requires("wandb")
def test_all_parts_of_a_run_are_one_run_of_wandb(here, shared, configure, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    job = Job(here, configure, shared / "run", log("=wandb"), "train.epochs=2")
    job.part(stop="SIGTERM", after=5)
    job.part()
    found = {path.name.rpartition("-")[2] for path in job.directory.path.glob("wandb/offline-*")}
    assert len(found) == 1
    assert list(job.directory.path.glob("wandb/offline-*/*.wandb"))


def samples(text):
    """Parse a file as a textfile collector does; each metric has one type line before it."""
    found, known = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind == "gauge"
            assert name not in known
            known.add(name)
        elif not line.startswith("# HELP "):
            key, _, value = line.rpartition(" ")
            assert key.partition("{")[0] in known
            assert key not in found
            found[key] = float(value)
    return found


@pytest.mark.ranks(1, 2)
def test_the_prometheus_file_has_the_last_values_of_each_rank(here, shared, configure):
    job = Job(here, configure, shared / "run", log("=prometheus"), 'name="a \\"b\\""')
    job.part(stop="SIGTERM", after=4)
    job.part()
    here.comm.barrier()
    path = job.directory.path / "metrics.prom"
    found = samples(path.read_text())
    records = read(job.directory.metrics)
    step = [r for r in records if r["event"] == "step"][-1]
    run = r'run="a \"b\""'
    assert found[f"hpctrain_step{{{run}}}"] == step["step"] == 24
    assert found[f"hpctrain_train_loss{{{run}}}"] == step["loss"]
    assert found[f'hpctrain_step_seconds{{{run},part="input"}}'] == step["input_s"]
    assert found[f'hpctrain_test_metric{{{run},metric="accuracy"}}'] == records[-1]["metric"]
    assert found[f"hpctrain_finished{{{run}}}"] == 1
    of_ranks = [key for key in found if 'part="compute"' in key and "rank=" in key]
    assert len(of_ranks) == here.comm.size
    hosts = here.topology.hosts
    assert all(any(f'host="{host}"' in key for host in hosts) for key in of_ranks)
    assert [each.name for each in path.parent.glob("metrics.prom*")] == ["metrics.prom"]


def test_a_value_that_is_not_finite_is_written_as_prometheus_expects(tmp_path):
    logger = factory("prometheus")(tmp_path, {"name": 'r\\u"n\n'})
    step = {"event": "step", "step": 1, "epoch": 1, "loss": None, "lr": 0.1, "samples_per_s": 1.0}
    times = {"compute_s": 1.0, "communication_s": 0.0, "input_s": 0.0, "skipped": 2}
    logger.write({**step, **times})
    text = (tmp_path / "metrics.prom").read_text()
    run = r'{run="r\\u\"n\n"}'
    assert f"hpctrain_train_loss{run} NaN" in text.splitlines()
    assert f"hpctrain_left_out_steps{run} 2.0" in text.splitlines()
