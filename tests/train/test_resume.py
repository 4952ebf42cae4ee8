"""A stopped and resumed run has the same bits as an uninterrupted run."""

import json
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import hpctrain
from hpctrain.core.errors import CheckpointError, ConfigError, MismatchError
from hpctrain.core.keys import render
from hpctrain.core.records import read
from hpctrain.launch.lease import Lease
from hpctrain.train.load_config import load as load_config
from hpctrain.train.loop import Outcome, Stopped
from hpctrain.train.resume import check_same, continues_run, finished
from hpctrain.train.run import RunOptions, run
from hpctrain.train.run_directory import RunDirectory
from hpctrain.train.run_state import RunState
from hpctrain.train.step_exchange import check_fit
from hpctrain.train.task import build
from tests.harness import preload
from tests.train.job import WAYS, Job, assert_same_checkpoint, assert_same_run
from tests.train.starting import start, write_config

PLAIN = ["model.target=tests.train.problem:noisy_model"]
SINGLE = [
    "model.target=tests.train.problem:noisy_model",
    "model.args={single = true, width = 33}",
    "data.args.single=true",
]
NADAM = ["optimizer.name=NAdam", "optimizer.args={}", "train.clip_norm=0.1"]
ADAMW = ["optimizer.name=AdamW", "optimizer.args={}", "train.clip_norm=0.1"]
FIXED = [
    "model.target=tests.train.problem:model",
    "model.args.dropout=0.3",
    "train.reproducible=true",
    "train.micro_shards=4",
    "checkpoint.every=3",
    "log.hash_every=1",
]
HALF = [
    "train.precision=fp16",
    "loss.target=tests.train.problem:steep",
    "train.accumulate=2",
    "train.ema=0.9",
    "train.clip_value=0.02",
    'optimizer.groups=[{ match = "*.bias", lr = 0.01, momentum = 0.5 }]',
    "test.patience=9",
    'test.metric=["f1", "top2"]',
    "checkpoint.every=3",
]
WINDOW = ["data.order=window", "checkpoint.keep_best=1", "checkpoint.background=false"]


AFTER = (2, 2, 1, 4, 6)  # steps of each part before the stop request


@pytest.mark.limit(120)
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([*SINGLE, "checkpoint.every=3"], id="float32", marks=pytest.mark.ranks(1, 4)),
        pytest.param([*PLAIN, *NADAM, *WINDOW], id="nadam, window", marks=pytest.mark.ranks(2)),
        pytest.param([*SINGLE, *HALF], id="fp16, ema, groups", marks=pytest.mark.ranks(2)),
        pytest.param([*FIXED, *ADAMW], id="reproducible", marks=pytest.mark.ranks(3)),
    ],
)
def test_a_run_stopped_by_any_method_ends_with_the_same_bits(here, configure, shared, overrides):
    whole = Job(here, configure, shared / "whole", *overrides)
    assert isinstance(whole.part(), Outcome)
    parts = Job(here, configure, shared / "parts", *overrides)
    done, asked = [], 0
    # The parts stop after 3 steps, at the end of an epoch, after one step, and during tests.
    for number, (way, after) in enumerate(zip(WAYS, AFTER, strict=True)):
        is_signal = way.startswith("SIG")
        stopped = parts.part(stop=way, after=after, on_rank=number % here.comm.size * is_signal)
        assert isinstance(stopped, Stopped)
        assert stopped.reason == way
        done.append(stopped.step)
    here.comm.barrier()
    num_skipped = read(whole.directory.metrics)[-1].get("skipped", 0)  # by fp16, at the start
    for after, step in zip(AFTER, done, strict=True):
        asked += after + num_skipped
        # After the last step of an epoch the stop ends the test; otherwise one more step is taken.
        assert step == asked + bool(asked % 6)
        asked, num_skipped = step, 0
    assert isinstance(parts.part(), Outcome)
    assert_same_run(whole, parts)
    assert_same_checkpoint(whole, parts)


@pytest.mark.ranks(1, 3)
def test_a_stop_between_training_and_test_ends_the_test_before_its_first_batch(
    here, configure, shared
):
    job, num_tested = Job(here, configure, shared / "run", *SINGLE), 0
    task = job.built()
    begin = task.model.eval

    def count(module, *_):
        nonlocal num_tested
        num_tested += not module.training

    def ask():
        if here.comm.rank == here.comm.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return begin()

    task.model.eval = ask
    task.model.register_forward_pre_hook(count)
    stopped = job.part(task=task)
    assert (stopped.step, stopped.reason, num_tested) == (6, "SIGUSR1", 0)
    assert isinstance(job.part(), Outcome)
    tests = [
        record["epoch"] for record in read(job.directory.metrics) if record["event"] == "test"
    ]
    assert tests == [1, 2, 3, 4]


def draw(module, *_):
    """Draw a random number in evaluation, as a model with random layers may."""
    if not module.training:
        torch.rand(1)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("overrides", [SINGLE, [*FIXED, "test.every_epochs=2", "train.ema=0.9"]])
def test_a_test_interrupted_by_a_stop_is_repeated(here, configure, shared, overrides, monkeypatch):
    # check for stops before each batch
    monkeypatch.setattr("hpctrain.train.evaluation.LOOK_S", 0.0)
    whole = Job(here, configure, shared / "whole", *overrides)
    task = whole.built()
    task.model.register_forward_pre_hook(draw)
    whole.part(task=task)
    parts = Job(here, configure, shared / "parts", *overrides)
    every = 2 if "test.every_epochs=2" in overrides else 1
    for number, epoch in enumerate((every, 4)):  # in the first test, and in the last one
        task, who = parts.built(), number % here.comm.size

        def ask(module, *_, task=task, place=(epoch, who)):
            if not module.training and (task.train.epoch, here.comm.rank) == place:
                os.kill(os.getpid(), signal.SIGUSR1)

        task.model.register_forward_pre_hook(ask)
        task.model.register_forward_pre_hook(draw)
        stopped = parts.part(task=task)
        assert (stopped.step, stopped.reason) == (6 * epoch, "SIGUSR1")
        tests = [r["epoch"] for r in read(parts.directory.metrics) if r["event"] == "test"]
        assert tests == [*range(every, epoch, every)]
    task = parts.built()
    task.model.register_forward_pre_hook(draw)
    assert isinstance(parts.part(task=task), Outcome)
    assert_same_run(whole, parts)
    assert_same_checkpoint(whole, parts)


@pytest.mark.ranks(1, 2)
def test_a_failed_run_resumes_from_its_last_checkpoint(here, configure, shared):
    overrides = [*PLAIN, "checkpoint.every=5", "checkpoint.background=false"]
    whole = Job(here, configure, shared / "whole", *overrides)
    whole.part()
    parts = Job(here, configure, shared / "parts", *overrides)
    for after in (3, 9, 9):  # before the first checkpoint, then at steps 9 and 14
        with suppress(KeyError):
            parts.part(after=after, fail=True)
    parts.part()
    assert_same_run(whole, parts)
    assert_same_checkpoint(whole, parts)
    events = [record["event"] for record in read(parts.directory.metrics)]
    assert events.count("started") == 1
    assert events.count("resumed") == 2


@pytest.mark.parametrize("where", ["half is lost", "zeros within"])
@pytest.mark.ranks(2)
def test_records_lost_in_a_power_failure_do_not_prevent_a_resume(
    here, configure, shared, where, caplog
):
    """A power failure may also leave zeros, in pages of the file that were never written."""
    job = Job(here, configure, shared / "run", *PLAIN)
    job.part(stop="SIGTERM", after=9)
    here.comm.barrier()
    steps = [record["step"] for record in read(job.directory.metrics) if "step" in record]
    here.comm.barrier()  # rank 0 overwrites the file that others read
    if here.comm.rank == 0:
        whole = job.directory.metrics.read_bytes().split(b"\n")
        if where == "half is lost":
            whole = [*whole[: len(whole) // 2], b""]
        else:
            once = [step for step in steps if steps.count(step) == 1]
            lost = next(n for n, line in enumerate(whole) if json.loads(line).get("step") in once)
            whole[lost] = bytes(len(whole[lost]))
            whole[-1] = bytes(4096) + b"\n" + bytes(9)
        job.directory.metrics.write_bytes(b"\n".join(whole))
    here.comm.barrier()
    assert isinstance(job.part(), Outcome)
    here.comm.barrier()
    message = "lines of" in caplog.text and "are not records" in caplog.text
    assert message == (here.comm.rank == 0 and where != "half is lost")
    if where != "half is lost":
        found = [record["step"] for record in read(job.directory.metrics) if "step" in record]
        assert len(set(steps) - set(found)) == 1
    assert finished(job.directory) is not None


def test_a_resume_needs_an_existing_run_with_the_same_configuration(here, configure, shared):
    job = Job(here, configure, shared / "run", *PLAIN)
    auto = configure(*PLAIN, "checkpoint.resume=auto")
    with pytest.raises(ConfigError, match="leave --resume out"):
        continues_run(job.config, job.directory, asked=True)
    assert not continues_run(auto, job.directory, asked=False)
    job.part(stop="SIGTERM", after=1)
    assert continues_run(job.config, job.directory, asked=True)
    assert continues_run(auto, job.directory, asked=False)
    assert not continues_run(job.config, job.directory, asked=False)
    other = configure(*PLAIN, "train.epochs=5", "log.every_steps=3", "train.global_batch=9")
    with pytest.raises(ConfigError, match=r"train.epochs was 4, is 5.*--changed") as refused:
        check_same(job.directory, other, changed=False)
    assert "log.every_steps" not in str(refused.value)
    assert len(check_same(job.directory, other, changed=True)) == 3
    assert check_same(job.directory, job.config, changed=False) == []
    with pytest.raises(ConfigError, match=r"config\.toml: seed was 0, is 1; set"):
        check_same(job.directory, configure(*job.overrides, "seed=1"), changed=False)


def test_changed_optimizer_arguments_apply_and_fixed_keys_are_rejected(here, configure, shared):
    job = Job(here, configure, shared / "run", *PLAIN, "optimizer.args={momentum=0.9}")
    job.part(stop="SIGTERM", after=1)
    for kept in ("seed=1", "data.order=window", "optimizer.name=AdamW"):
        with pytest.raises(
            ConfigError, match=f"a resumed run must keep its .* {kept.partition('=')[0]} was"
        ):
            check_same(job.directory, configure(*job.overrides, kept), changed=True)
    for args, expected in (("{momentum=0.5}", 0.5), ("{}", 0.0)):
        job.config = configure(*job.overrides, f"optimizer.args={args}")
        job.part(stop="SIGTERM", after=1)
        groups = job.final()["optimizer"]["param_groups"]
        assert {group["momentum"] for group in groups} == {expected}


@pytest.mark.launches  # checks output of one rank
def test_force_concerns_jobs_and_changed_concerns_configurations(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, "tests.train.problem:model", epochs=3)
    before, after = (load_config(Path("small.toml"), [f"train.epochs={n}"]) for n in (3, 1))
    directory = RunDirectory(before.config.directory)
    directory.create(render(before.config), {}, {})
    directory.metrics.write_text('{"event": "test", "step": 1}\n')
    lease = Lease(directory.path)
    assert lease.attempt() == ""
    try:
        with pytest.raises(MismatchError, match=r"train\.epochs was 3, is 1; .* add --changed"):
            run(after, {}, RunOptions(resume=True, force=True))
        assert lease.is_held(looks=True)  # a rejected command does not take over the lease
        lease.release()
        for config in (after, before):  # the second configuration extends a finished run
            assert run(config, {}, RunOptions(resume=True, changed=True)) == 0
        with pytest.raises(MismatchError, match=r"train.epochs = 1 gives \d+ steps"):
            run(after, {}, RunOptions(resume=True, changed=True))
    finally:
        lease.release()
        hpctrain.shutdown()
    message = capsys.readouterr().out
    assert "changed: train.epochs was 3, is 1" in message
    assert "there is no checkpoint yet: the run starts again from step 0" in message
    assert "changed: train.epochs was 1, is 3" in message
    assert "part 2 of the run: the previous part finished" in message
    assert max(record["epoch"] for record in read(directory.metrics) if "epoch" in record) == 3


def drawn() -> list[float]:
    return [torch.rand(()).item(), np.random.random(), random.random()]  # noqa: NPY002


@pytest.mark.ranks(2, 3)
def test_ranks_draw_different_numbers_after_a_resume_on_other_ranks(here, configure):
    state = RunState(task=build(configure(), here.comm))
    seen = [drawn()]  # numbers of the first step
    for step in (7, 8):
        state.step = step
        state.restore(state.shared(), None)
        seen.append(drawn())
    everywhere = [numbers for each in here.comm.allgather_object(seen) for numbers in each]
    for numbers in zip(*everywhere, strict=True):
        assert len(set(numbers)) == len(numbers) == 3 * here.comm.size


@pytest.mark.launches
def test_a_stopped_job_exits_with_85_and_resumes_on_another_number_of_ranks(
    tmp_path, monkeypatch, capsys
):
    write_config(tmp_path, "tests.train.problem:stopping_model", epochs=3)
    launch = ("-m", "hpctrain", "launch", "-n", "2", "--nodes", "2")
    train = [*preload.python(), "-m", "hpctrain", "train", "small.toml"]
    stopped = start(*launch, "--", *train, cwd=tmp_path)
    assert stopped.returncode == 85, stopped.stderr
    assert "stopped by SIGUSR1 after step 6 of 12" in stopped.stdout
    output = " ".join((stopped.stdout + stopped.stderr).split())  # lines of 80 columns
    assert output.count("--resume continues it") == 1
    assert "the ranks have stopped" not in stopped.stderr
    assert "Traceback" not in stopped.stderr
    monkeypatch.chdir(tmp_path)
    whole = load_config(Path("small.toml"), ["output_dir=whole"])
    again = load_config(Path("small.toml"))
    message = []
    try:
        for config, how in (
            (whole, RunOptions()),
            (again, RunOptions(resume=True)),
            (again, RunOptions(resume=True)),
        ):
            assert run(config, {}, how) == 0
            message.append(capsys.readouterr().out)
    finally:
        hpctrain.shutdown()
    assert "continuing after step 6 of 12" in message[1]
    assert "the checkpoint was saved by 2 ranks, this run has 1" in message[1]
    lines = message[2].splitlines()
    assert lines[0] == "the run in runs/small is finished, there is nothing to resume"
    assert lines[1] == message[1].splitlines()[-1]
    curves = [
        [record["loss"] for record in read(path) if record["event"] in ("step", "test")]
        for path in (Path("runs/small/metrics.jsonl"), Path("whole/metrics.jsonl"))
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-9)


def test_every_mismatched_tensor_is_listed():
    have = {"a": torch.zeros(2), "b": torch.zeros(2, 3), "c": torch.zeros(1), "ok": torch.ones(1)}
    want = {"a": torch.zeros(3), "b": torch.zeros(2, 3).half(), "ok": torch.ones(1)}
    want["d"] = torch.zeros(())
    with pytest.raises(CheckpointError, match="and dtypes, but 4 tensors differ") as caught:
        check_fit(have, want)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "a: float32 (2,), expected float32 (3,)",
        "b: float32 (2, 3), expected float16 (2, 3)",
        "d: missing, expected float32 ()",
        "c: float32 (1,), not in the model",
    ]
    check_fit(want, want)
