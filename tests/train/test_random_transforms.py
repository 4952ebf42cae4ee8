"""Runs with random transforms of samples have the same bits each time."""

import pytest

from hpctrain.core.errors import DataError, MismatchError
from hpctrain.train.loop import Outcome, Stopped
from hpctrain.train.task import build
from tests.train.job import Job, assert_same_run

NO_TEST = "data.test_transform=none"
RANDOM = [
    "model.target=tests.train.problem:noisy_model",
    "train.epochs=2",
    "log.hash_every=3",
    "data.per_sample=true",
    NO_TEST,
    "data.prefetch=6",
]
IN_THREADS = ["data.transform=tests.train.problem:jittered", "data.random=true"]
IN_PROCESSES = ["data.transform=tests.train.problem:jolted", "data.workers=1"]


@pytest.mark.ranks(1, 2)
def test_equal_runs_and_a_resumed_run_have_the_same_bits(here, configure, shared):
    overrides = [*RANDOM, *IN_THREADS]
    runs = [Job(here, configure, shared / f"run-{i}", *overrides) for i in range(4)]
    assert all(isinstance(run.part(), Outcome) for run in runs[:3])
    assert isinstance(runs[3].part(stop="SIGTERM", after=4), Stopped)
    assert isinstance(runs[3].part(), Outcome)
    for run in runs[1:]:
        assert_same_run(runs[0], run)


@pytest.mark.ranks(2)
@pytest.mark.limit(120)
@pytest.mark.parametrize("overrides", [IN_THREADS, IN_PROCESSES], ids=["threads", "processes"])
def test_reproducible_runs_transform_samples_identically_on_any_number_of_ranks(
    here, configure, shared, overrides
):
    rank = here.comm.rank
    fixed = [*RANDOM, *overrides, "train.reproducible=true", "train.micro_shards=4"]
    together, alone = (
        Job(here, configure, shared / name, *fixed, "train.epochs=1")
        for name in ("together", f"alone-{rank}")
    )
    together.part()
    groups = [here.comm.group([each]) for each in range(here.comm.size)]
    alone.part(groups[rank])
    assert_same_run(together, alone)


def test_reproducible_runs_reject_random_transforms_of_batches(here, configure):
    whole = ["data.transform=tests.train.problem:jolted", "data.workers=1"]
    task = build(configure(*whole, "train.reproducible=true"), here.comm)
    with task.train, pytest.raises(DataError, match="depend on the number of ranks"):
        next(iter(task.train))


def test_random_transforms_must_accept_a_generator(here, configure):
    takes_none = "data.transform=tests.train.problem:unchanged"
    with pytest.raises(MismatchError, match=r"data\.transform: unchanged"):
        build(configure(takes_none, *IN_THREADS[1:], "data.per_sample=true", NO_TEST), here.comm)
