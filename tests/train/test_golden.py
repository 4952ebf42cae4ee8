"""Check that run directories and plans that version 1.0 wrote stay readable.

``hpctrain train`` on two ranks wrote ``golden/run-v1``, without its checkpoint, and the runs of
``golden/stopped``, which were stopped half-way; each of these has the state of another method. The
names of the host and of folders were replaced. The files must not be rewritten.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.comm.plan import planning
from hpctrain.comm.plan.planning import StoredPlan
from hpctrain.core.errors import ConfigError
from hpctrain.core.formats import fault_of, stamp
from hpctrain.train import run_directory
from hpctrain.train.history import RunHistory
from hpctrain.train.load_config import load
from hpctrain.train.resume import continues_run
from hpctrain.train.run_directory import RunDirectory

GOLDEN = Path(__file__).parent / "golden/run-v1"
FILES = {
    "config.toml": "a346c3348a4c0c87",
    "env.json": "f136161759523a5b",
    "metrics.jsonl": "15fe495681a1f4c5",
    "plan.json": "5e0986d1da3b7787",
}
STOPPED = GOLDEN.parent / "stopped"
DATA = Path(__file__).parents[1] / "data/golden/stamped"
LOSSES = {
    "synchronous": ("d8eb557e85a0f981", 0.6072412133216858),
    "local_sgd": ("c4ae9aa84760772f", 0.5467834919691086),
    "ssp": ("9719ac4934cebc91", 0.570083811879158),
}
"""Digest of a stopped run, and the test loss of the same run without a stop, by its method."""
NEWER = stamp(2, "1.7")
REFUSED = "format version must be at most 1, got 2; install hpctrain 1.7 or later"


def test_the_golden_run_has_the_current_versions_and_is_unchanged():
    assert run_directory.VERSION == planning.VERSION == 1
    digests = {
        each.name: hashlib.sha256(each.read_bytes()).hexdigest()[:16] for each in GOLDEN.iterdir()
    }
    assert digests == FILES


def test_the_golden_run_is_read():
    run = RunHistory.read(GOLDEN)
    assert (run.title, run.state) == ("run-v1 (golden)", "finished")
    assert [record["step"] for record in run.of("step")] == [1, 2, 3, 4]
    assert run.environment["hpctrain"] == "1.0.0rc1"
    config = load(GOLDEN / "config.toml").config
    assert (config.name, config.train.epochs, config.train.global_batch) == ("golden", 2, 8)


def test_the_golden_plan_is_read_and_would_be_written_unchanged():
    stored = StoredPlan.read(GOLDEN / "plan.json")
    content = json.loads((GOLDEN / "plan.json").read_text())
    assert content == content | json.loads(json.dumps(stored.as_dict()))
    assert len(stored.plan.measured) > 3


@pytest.mark.parametrize("method", LOSSES)
def test_the_stopped_runs_are_unchanged(method):
    digest = hashlib.sha256()
    for file in sorted(path for path in (STOPPED / method).rglob("*") if path.is_file()):
        digest.update(file.relative_to(STOPPED / method).as_posix().encode() + file.read_bytes())
    assert digest.hexdigest()[:16] == LOSSES[method][0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", LOSSES)
def test_a_stopped_run_continues_as_if_it_had_not_stopped(hvd, tmp_path, monkeypatch, method):
    folder = hvd.broadcast_object(tmp_path)
    if hvd.rank() == 0:
        shutil.copytree(STOPPED, folder, dirs_exist_ok=True)
        shutil.copytree(DATA, folder / "data")
        shutil.copy(folder / method / "config.toml", folder / "golden.toml")
    hvd.barrier()
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, ["train", "golden.toml", "--resume"])
    assert result.exit_code == 0, (result.output, result.exception)
    (finished,) = RunHistory.read(folder / method).of("finished")
    assert finished["step"] == 8
    tolerance = 0.5 if method == "ssp" else 1e-3  # ssp depends on the order of arrival
    assert finished["loss"] == pytest.approx(LOSSES[method][1], rel=tolerance)


@pytest.fixture
def newer(tmp_path):
    run = shutil.copytree(GOLDEN, tmp_path / "run")
    for name in ("env.json", "plan.json"):
        (run / name).write_text(json.dumps(json.loads((run / name).read_text()) | NEWER))
    return run


def test_newer_formats_are_refused_with_the_version_that_reads_them(newer):
    result = CliRunner().invoke(app, ["report", str(newer)])
    assert f"the run {newer} cannot be read: its {REFUSED}" in str(result.exception)
    with pytest.raises(ConfigError, match=REFUSED):
        StoredPlan.read(newer / "plan.json")
    with pytest.raises(ConfigError, match=REFUSED):
        continues_run(load(newer / "config.toml").config, RunDirectory(newer), asked=True)


@pytest.mark.ranks(1, 2)
@pytest.mark.usefixtures("hvd")
def test_evaluation_refuses_a_newer_run_on_all_ranks(newer):
    result = CliRunner().invoke(app, ["evaluate", str(newer)])
    assert REFUSED in str(result.exception)


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({}, ""),
        ({"version": 1}, ""),
        ({"version": 2}, "install a newer hpctrain"),
        ({"version": True}, "got True"),
        ({"version": 0}, "got 0"),
    ],
)
def test_a_record_without_a_version_has_version_1(record, fault):
    found = fault_of(record, 1)
    assert fault in found
    assert bool(found) == bool(fault)
