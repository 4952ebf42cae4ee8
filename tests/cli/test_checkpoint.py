"""Check ``hpctrain checkpoint info, verify, export, diff`` on the command line."""

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from hpctrain import checkpoint
from hpctrain.cli.main import app
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.managed import flip
from tests.processes import ended


def write(run, step, *, lr=0.1, shift=0.0, rank=0):
    state = {
        "model": {"0.weight": torch.arange(12.0).reshape(3, 4), "0.bias": torch.zeros(3) + shift},
        "optimizer": {"state": {}, "param_groups": [{"lr": lr, "params": [0, 1]}]},
    }
    checkpoint.save(
        run / "checkpoints" / f"step-{step:08d}",
        state,
        SerialCommunicator(),
        step=step,
        private={"random": rank},
        facts={"uuid": "abc"},
    )
    return run


@pytest.fixture
def run(tmp_path):
    write(tmp_path / "run", 10)
    return write(tmp_path / "run", 20)


def call(*words):
    return CliRunner().invoke(app, ["checkpoint", *map(str, words)])


def output_by(*words):
    """Return the error that the program prints as its only line."""
    error = call(*words).exception
    assert isinstance(error, CheckpointError)
    assert "\n" not in str(error)
    return str(error)


def test_info_describes_the_newest_checkpoint(run):
    result = call("info", run, "--largest", 1)
    assert result.exit_code == 0
    assert "2 checkpoints: step-00000010, step-00000020" in result.output
    assert "step-00000020: step 20\n" in result.output
    assert "2 tensors, 15 elements, 60 B" in result.output
    assert "model/0.weight" in result.output
    assert "model/0.bias" not in result.output
    assert "uuid             abc" in result.output
    one = call("info", run / "checkpoints" / "step-00000010")
    assert "step 10" in one.output


def test_info_as_json_is_read_by_programs(run):
    record = json.loads(call("info", run, "--json").output)
    assert (record["step"], record["world"], record["facts"]) == (20, 1, {"uuid": "abc"})
    assert len(record["checkpoints"]) == 2


def test_verify_ends_with_0_1_or_2(run, tmp_path):
    assert call("verify", run).exit_code == 0
    flip(run / "checkpoints" / "step-00000020" / "rank-00000.safetensors")
    result = call("verify", run)
    assert result.exit_code == 1
    assert "step-00000010: intact\n" in result.output
    assert "step-00000020: damaged" in result.output
    assert "rank-00000.safetensors" in result.output
    record = json.loads(call("verify", run, "--json").output)
    assert [len(report["faults"]) for report in record] == [0, 1]
    assert "pass a run directory" in output_by("verify", tmp_path / "none")


def test_an_error_is_one_line_of_the_program(tmp_path):
    command = [sys.executable, "-m", "hpctrain", "checkpoint", "info", str(tmp_path)]
    done = ended(command)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "must contain a complete checkpoint" in done.stderr


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_gives_one_line(run, tmp_path, name):
    flip(run / "checkpoints" / "step-00000020" / name)
    assert name in output_by("export", run, tmp_path / "x.pt")
    assert name in output_by("diff", run, run)
    assert not (tmp_path / "x.pt").exists()


def test_export_writes_what_torch_loads(run, tmp_path):
    out = tmp_path / "model.pt"
    result = call("export", run, out, "--only", "model")
    assert result.exit_code == 0
    assert result.output.startswith(f"{out}: model of {run}")
    found = torch.load(out, weights_only=True)
    assert torch.equal(found["0.weight"], torch.arange(12.0).reshape(3, 4))
    assert call("export", run, tmp_path / "m.safetensors", "--only", "model").exit_code == 0
    assert "model, optimizer of the state" in output_by("export", run, tmp_path / "x.safetensors")
    assert "must end in .pt" in output_by("export", run, tmp_path / "directory")
    assert "already exists" in output_by("export", run, out)
    assert call("export", run, out, "--overwrite").exit_code == 0


def test_diff_names_the_first_tensor_and_by_how_much(run, tmp_path):
    same = call("diff", run, run / "checkpoints" / "step-00000010")
    assert (same.exit_code, same.output.count("bitwise identical")) == (0, 1)
    other = write(tmp_path / "other", 20, lr=0.2, shift=0.5, rank=1)
    result = call("diff", run, other)
    assert result.exit_code == 1
    assert "values (1), plain (2); the first is\n  model/0.bias" in result.output
    assert "3 of 3 elements differ by at most 0.5" in result.output
    assert "optimizer/param_groups/0/lr: 0.1, and 0.2" in result.output
    assert "private/0/random: 0, and 1" in result.output
    assert call("diff", run, other, "--only", "optimizer/state").exit_code == 0
    both = call("diff", run, other, "--only", "model", "--only", "optimizer")
    assert "values (1), plain (1); " in both.output
    assert "there is no modle" in output_by("diff", run, other, "--only", "modle")
    short = call("diff", run, other, "--lines", 1)
    assert "and 2 more; --lines 3 lists all" in short.output
    record = json.loads(call("diff", run, other, "--only", "model", "--json").output)
    assert [(item["path"], item["max_abs"]) for item in record] == [("model/0.bias", 0.5)]


def test_times_and_numbers_of_records_are_named_and_no_difference(tmp_path):
    def diff_of_a_and(name, **changes):
        for folder, message in (("a", {}), (name, changes)):
            state = {"step": 1, "training_s": 0.5, "num_records": 3, "other": {"num_records": 3}}
            own = {"tally": {"sums": torch.tensor([*message.pop("sums", [1.0] * 6)])}}
            path = tmp_path / folder / "checkpoints" / "step-00000001"
            comm = SerialCommunicator()
            checkpoint.save(path, state | message, comm, step=1, private=own)
        result = call("diff", tmp_path / "a", tmp_path / name)
        return result.exit_code, result.output.replace("\n", " ")

    times = [1.0, 1.0, 2.0, 2.0, 2.0, 1.0]
    code, message = diff_of_a_and("same", training_s=0.7, num_records=4, sums=times)
    assert code == 0
    assert "are bitwise identical, except for measured times and numbers of reco" in message
    assert message.endswith("records: training_s, num_records, private/0/tally/sums ")
    code, message = diff_of_a_and("later", step=2, num_records=4)
    assert (code, "plain (1), records (1)" in message) == (1, True)
    code, message = diff_of_a_and("loss", sums=[2.0, *times[1:]])
    assert (code, "values (1)" in message) == (1, True)
    code, message = diff_of_a_and("other", other={"num_records": 4})
    assert (code, "plain (1)" in message) == (1, True)


def test_one_of_several_ranks_does_the_work(run, tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    result = call("export", run, tmp_path / "x.pt")
    assert (result.exit_code, result.output) == (0, "")
    assert not (tmp_path / "x.pt").exists()
