"""Validation samples are used for tests during training; the test set is used once, at the end."""

from dataclasses import replace

import numpy as np
import pytest

from hpctrain.core.errors import ConfigError, MismatchError
from hpctrain.core.records import read
from hpctrain.train.evaluation import evaluate
from hpctrain.train.history import RunHistory
from hpctrain.train.predict import load_task, predict
from hpctrain.train.task import build
from tests.train.job import Job, assert_same_run
from tests.train.problem import NUM_SAMPLES

HELD = ["data.validation=0.3"]
THREE_SETS = ["data.target=tests.train.problem:three_sets"]
AVERAGED = [*HELD, "train.ema=0.8"]
NUM_HELD = round(0.3 * NUM_SAMPLES)  # also in the validation set of THREE_SETS

SIZES = pytest.mark.ranks(1, 2, 3)


def values_of(loader):
    dataset = loader.dataset
    return set(dataset.take(np.arange(len(dataset)))["x"][:, 0].tolist())


BOTH = pytest.mark.parametrize("held", [HELD, THREE_SETS], ids=["fraction", "three sets"])


@SIZES
def test_training_and_validation_samples_are_disjoint(here, configure):
    task = build(configure(*HELD, "train.global_batch=9"), here.comm)
    train, held = values_of(task.train), values_of(task.test)
    assert (len(train), len(held)) == (NUM_SAMPLES - NUM_HELD, NUM_HELD)
    assert not train & held
    # in this problem the test set has the same samples
    assert train | held == values_of(task.held_out)
    assert here.comm.allgather_object(held) == [held] * here.comm.size
    other = build(configure(*HELD, "train.global_batch=9", "seed=1"), here.comm)
    assert values_of(other.test) != held


@SIZES
@pytest.mark.parametrize("held", [HELD, THREE_SETS, AVERAGED], ids=["fraction", "sets", "ema"])
def test_tests_use_the_validation_samples_and_the_last_one_the_test_set(
    here, configure, shared, held
):
    job = Job(here, configure, shared / "run", *held, "train.epochs=2")
    task = job.built()
    assert (task.ema is None) is (held is not AVERAGED)
    job.part(task=task)
    here.comm.barrier()
    records = read(job.directory.metrics)
    tests = [record for record in records if record["event"] == "test"]
    assert [record["num_samples"] for record in tests] == [NUM_HELD] * 2
    assert records[-1]["num_samples"] == NUM_SAMPLES
    for one, of in ((records[-1], replace(task, test=task.held_out)), (tests[-1], task)):
        scores = evaluate(of)
        assert (one["loss"], one["metric"]) == (scores.loss, scores.metric)
    if task.ema is not None:
        shown = evaluate(replace(task, test=task.held_out, ema=None))
        assert shown.loss != records[-1]["loss"]
    history = RunHistory.read(job.directory.path)
    assert (history.tested, history.test["num_samples"]) == ("validation", NUM_SAMPLES)


@SIZES
@BOTH
def test_a_finished_run_is_evaluated_again_on_each_of_its_parts(here, configure, shared, held):
    job = Job(here, configure, shared / "run", *held, "train.epochs=2")
    job.part()
    here.comm.barrier()
    path, how = job.directory.path, {"overrides": [], "which": "last"}
    task, _ = load_task(path, here.comm, split="validation", **how)
    [*_, last] = [one for one in read(job.directory.metrics) if one["event"] == "test"]
    again = evaluate(task)
    assert (again.num_samples, again.loss, again.metric) == (
        NUM_HELD,
        last["loss"],
        last["metric"],
    )
    assert predict(task, shared / "out.h5", {})[0] == NUM_HELD
    assert load_task(path, here.comm, split="test", **how)[0].test.dataset.uuid == (
        job.built().held_out.dataset.uuid
    )


@SIZES
def test_a_run_without_validation_samples_is_not_evaluated_on_them(here, configure, shared):
    job = Job(here, configure, shared / "run", "train.epochs=1")
    job.part()
    here.comm.barrier()
    with pytest.raises(ConfigError, match=r"returns no validation set; use --split test or train"):
        load_task(job.directory.path, here.comm, overrides=[], which="last", split="validation")


def test_a_validation_set_and_a_fraction_together_are_rejected(here, configure):
    with pytest.raises(MismatchError, match=r"data.validation must be 0 if data.target returns"):
        build(configure(*HELD, *THREE_SETS), here.comm)


@pytest.mark.ranks(2)
def test_a_resumed_run_holds_out_the_same_samples(here, configure, shared):
    whole, parts = (Job(here, configure, shared / name, *HELD) for name in ("a", "b"))
    whole.part()
    parts.part(stop="SIGUSR1", after=4)
    parts.part()
    assert_same_run(whole, parts)


def test_a_validation_fraction_without_or_with_all_samples_is_rejected(here, configure):
    for part in ("0.001", "0.999"):
        with pytest.raises(
            MismatchError, match=r"data.validation must leave samples for training and"
        ):
            build(configure(f"data.validation={part}"), here.comm)
    with pytest.raises(ConfigError, match=r"data.validation must be 0 with data.stage"):
        configure(*HELD, "data.stage=auto")
