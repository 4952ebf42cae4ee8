"""Uses of a finished run: evaluate, predict, initial weights, and extension."""

import json
import sys
from pathlib import Path

import h5py
import pytest
import torch
from typer.testing import CliRunner

import hpctrain
from hpctrain.checkpoint.export import export
from hpctrain.checkpoint.inspection import checkpoint_of, checkpoints_in
from hpctrain.cli.main import app
from hpctrain.core.errors import CheckpointError, MismatchError
from hpctrain.core.records import read
from hpctrain.train.evaluation import evaluate
from hpctrain.train.load_config import load as load_config
from hpctrain.train.loop import Outcome
from hpctrain.train.predict import load_task, predict
from hpctrain.train.resume import check_same
from hpctrain.train.run import RunOptions, run
from hpctrain.train.task import build
from tests.train.job import Job, assert_same_bits, assert_same_run
from tests.train.problem import NUM_SAMPLES, samples
from tests.train.starting import write_config

KEPT = ["train.ema=0.9", "checkpoint.keep_best=1", 'test.metric=["accuracy", "f1"]']
TRACED = ["log.profile=[2, 3]", "log.profile_ranks=[0, 7]"]


@pytest.fixture
def job(here, configure, shared):
    made = Job(here, configure, shared / "run", *KEPT, *TRACED, "model.args.norm=true")
    made.part()
    here.comm.barrier()
    return made


def weights_of(task):
    return {name: value.clone() for name, value in task.model.state_dict().items()}


@pytest.mark.ranks(1, 2, 3)
def test_a_run_is_evaluated_again_and_predictions_have_the_order_of_the_data(here, job, shared):
    path, file = job.directory.path, shared / "out" / "predictions.h5"
    how = {"overrides": ["train.global_batch=10"], "split": "train"}
    task, source = load_task(path, here.comm, overrides=[], which="last", split="test")
    last = read(job.directory.metrics)[-1]
    again = evaluate(task)
    assert (again.loss, again.metrics) == (last["loss"], last["metrics"])
    task, source = load_task(path, here.comm, which="24", **how)
    assert source.name == "step-00000024"
    assert_same_bits(weights_of(task), job.final()["ema"])
    assert predict(task, file, {"run": str(path)}) == (NUM_SAMPLES, 3)
    with torch.no_grad():
        expected = task.model.eval()(torch.from_numpy(samples()["x"]))
    with h5py.File(file) as written:
        assert written.attrs["run"] == str(path)
        torch.testing.assert_close(torch.from_numpy(written["output"][:]), expected)
    here.comm.barrier()
    before = file.read_bytes()
    with pytest.raises(MismatchError, match="already exists; choose another name"):
        predict(task, file, {})
    task.model.forward = lambda x: x.sum()
    with pytest.raises(MismatchError, match=r"one row per sample, but the model returned"):
        predict(task, shared / "other.h5", {})
    task.model.forward = lambda x: torch.nn.Linear(1, 2, dtype=x.dtype)(x)
    with pytest.raises(MismatchError, match=r"model\.target = .* refuses float64"):
        predict(task, shared / "other.h5", {})
    task.model.forward = lambda x: x[:, : 2 + (len(x) < 4)]  # another shape in the last batch
    with pytest.raises(MismatchError, match="predictions must have the same shape and type"):
        predict(task, shared / "other.h5", {})
    here.comm.barrier()
    assert file.read_bytes() == before
    assert sorted(each.name for each in shared.iterdir()) == ["d", "out", "run"]
    assert [each.name for each in file.parent.iterdir()] == [file.name]


@pytest.mark.ranks(1, 2, 3)
def test_initial_weights_from_a_run_a_checkpoint_or_a_file_have_the_same_bits(
    here, configure, job, shared, caplog
):
    final, norm = job.final(), "model.args.norm=true"
    if here.comm.rank == 0:
        export(final["ema"], shared / "w.safetensors")
        wrapped = {f"module.{name}": value for name, value in final["ema"].items()}
        torch.save({"state_dict": wrapped, "epoch": 3}, shared / "w.pt")
        torch.save([1, 2], shared / "list.pt")
        (shared / "text.pt").write_text("no weights")
    here.comm.barrier()
    run = job.directory.path
    places = (run, checkpoint_of(run, "last"), shared / "w.safetensors", shared / "w.pt")
    for place in places:
        task = build(configure(norm, f"model.init_from={place}"), here.comm)
        assert_same_bits(weights_of(task), final["ema"])
    other = ["model.args={ norm = true, width = 9 }", f"model.init_from={run}"]
    with pytest.raises(MismatchError) as refused:
        build(configure(*other), here.comm)
    assert "fits 6 of 9 tensors" in str(refused.value)
    assert "\n  1.weight: float64 (8, 6), expected float64 (9, 6)" in str(refused.value)
    task = build(configure(*other, "model.init_strict=false"), here.comm)
    assert_same_bits(task.model.state_dict()["4.bias"], final["ema"]["4.bias"])
    assert caplog.text.count("fits 6 of 9 tensors, the others keep") == (here.comm.rank == 0)
    for name, message in (
        ("list.pt", "must contain a state dict"),
        ("text.pt", "contains objects other than tensors"),
        ("none.pt", "cannot be read: .*No such file"),
    ):
        with pytest.raises(MismatchError, match=message):
            build(configure(f"model.init_from={shared / name}"), here.comm)


@pytest.mark.ranks(2)
def test_a_trace_contains_the_chosen_steps_and_ranks(job):
    (trace,) = job.directory.profile.iterdir()
    assert trace.name == "rank-0-steps-2-3.json"
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e.get("name") == "Optimizer.step#SGD.step" for e in events) == 2


@pytest.mark.ranks(1, 2)
def test_an_extended_run_has_the_bits_of_a_longer_one(here, configure, shared):
    how = ["schedule.name=constant", "train.ema=0.9"]
    whole = Job(here, configure, shared / "whole", *how)
    whole.part()
    job = Job(here, configure, shared / "run", *how)
    longer = job.config
    job.config = configure(*job.overrides, "train.epochs=2")
    job.part()
    here.comm.barrier()
    other = configure(*job.overrides, "train.global_batch=8")
    with pytest.raises(Exception, match=r"train\.global_batch was 9, is 8; set"):
        check_same(job.directory, other, changed=False)
    output = check_same(job.directory, longer, changed=False)
    assert output == ["train.epochs was 2, is 4"]
    job.config = longer
    job.part()
    assert_same_run(whole, job)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("sync", [[], ["sync.method=diloco", "train.global_batch=10"]])
def test_a_run_without_progress_ends_and_keeps_its_best_checkpoint(here, configure, shared, sync):
    # With mode = max the first test stays the best, because the loss falls.
    how = ["test.metric=loss", "test.mode=max", "test.patience=2", "train.epochs=9", *sync]
    job = Job(here, configure, shared / "run", *how)
    job.part(stop="SIGTERM", after=9)  # the count of tests without progress is restored
    outcome = job.part()
    assert isinstance(outcome, Outcome)
    here.comm.barrier()
    records = read(job.directory.metrics)
    tests = [record for record in records if record["event"] == "test"]
    assert [record["epoch"] for record in tests] == [1, 2, 3]
    assert records[-1]["event"] == "finished"
    best = {"step": tests[0]["step"], "epoch": 1, "metric": tests[0]["loss"]}
    assert records[-1]["best"] == outcome.best == best
    kept = [int(path.name[5:]) for path in checkpoints_in(job.directory.path)]
    assert {best["step"], records[-1]["step"]} <= {*kept}
    assert checkpoint_of(job.directory.path, "best").name.endswith(f"{best['step']}")
    with pytest.raises(CheckpointError, match=r"by its step, one of .* got '5'"):
        checkpoint_of(job.directory.path, "5")
    here.comm.barrier()
    job.config = configure(*job.overrides, "test.patience=3")
    job.part()
    here.comm.barrier()
    epochs = [r["epoch"] for r in read(job.directory.metrics) if r["event"] == "test"]
    assert epochs == [1, 2, 3, 4]


@pytest.mark.launches  # checks output of one rank
def test_a_run_reports_its_best_checkpoint_and_commands_accept_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    write_config(tmp_path, "tests.train.problem:model", epochs=5)
    judged = ['test.metric=["loss", "top2"]', "test.mode=max", "test.patience=1", "train.ema=0.5"]
    try:
        assert run(load_config(Path("small.toml"), judged), {}, RunOptions()) == 0
        *_, why, _, best, which, others, last = capsys.readouterr().out.splitlines()
        assert why == "ended after step 8 of 20: no improvement within test.patience = 1"
        assert best.endswith("in runs/small/checkpoints/step-00000004")
        assert best.startswith("best test loss ")
        which_weights = "the weights of the last step, averaged by train.ema"
        assert which == f"on the test data, with {which_weights}:"
        assert others.startswith("test top2 0.")
        runner, found = CliRunner(), {}
        for which in ("last", "best"):
            words = ["evaluate", "runs/small", "--checkpoint", which, "--json"]
            found[which] = json.loads(runner.invoke(app, words).stdout)
        assert last == f"test loss {found['last']['metric']:.4f}"
        assert best.split()[3] == f"{found['best']['metric']:.4f},"
        output = runner.invoke(app, ["evaluate", "runs/small"]).stdout.splitlines()
        assert output[-2:] == [others, last]
        for words, message in (
            (["evaluate", "runs/none"], "runs/none contains no run"),
            (["predict", "runs/small", "--output", "small.toml"], "already exists"),
        ):
            assert message in str(runner.invoke(app, words).exception)
        refused = runner.invoke(app, ["evaluate", "runs/small", "--split", "all"])
        assert (refused.exit_code, "'all' is not one of" in refused.stderr) == (2, True)
    finally:
        hpctrain.shutdown()
