"""Reproducible runs have the same bits on any number of ranks, also after a resume."""

import shutil

import pytest
import torch

from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import DataError, MismatchError
from hpctrain.core.records import read
from hpctrain.gradients.fixed_tree import aligned_parts
from hpctrain.train.loop import Outcome, Stopped
from hpctrain.train.resume import settled
from hpctrain.train.task import build
from tests.train.job import Job, assert_same_bits, assert_same_run, train_alone

FIXED = [
    "train.reproducible=true",
    "train.micro_shards=4",
    "model.args={dropout = 0.3, width = 33}",
    "log.hash_every=1",
]


@pytest.fixture(autouse=True)
def threads():
    """Restore the number of threads of torch."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "overrides",
    [
        # The last batch of an epoch has 1 of 53 samples, so seven micro-shards are empty.
        [
            "train.global_batch=13",
            "train.micro_shards=8",
            "log.every_steps=1",
            "train.clip_norm=0.05",
        ],
        [
            *("train.global_batch=20", "data.order=window"),
            *("model.args.norm=true", "optimizer.name=AdamW"),
        ],
    ],
    ids=["short", "buffers"],
)
def test_any_number_of_ranks_has_the_bits_of_the_plain_loop(here, configure, shared, overrides):
    if "optimizer.name=AdamW" in overrides:
        overrides = [*overrides, "optimizer.args={}"]
    job = Job(here, configure, shared / "run", *FIXED, *overrides)
    assert isinstance(job.part(), Outcome)
    task = build(job.config, here.comm)  # for its data
    plain, losses, alone = train_alone(job.config, task, is_fixed=True)
    here.comm.barrier()
    records = read(job.directory.metrics)
    hashes = [record["state_hash"] for record in records if "state_hash" in record]
    assert hashes == [*alone, alone[-1]]
    assert_same_bits(dict(job.final()["model"]), dict(plain.state_dict()))
    if job.config.log.every_steps == 1:
        assert [r["loss"] for r in records if r["event"] == "step"] == losses


@pytest.mark.ranks(4)
@pytest.mark.limit(120)
def test_a_run_resumes_on_other_numbers_of_ranks_bitwise(here, configure, shared):
    """Groups of ranks train concurrently, each a copy of the run."""
    overrides = [*FIXED, "checkpoint.keep_best=1", "model.args.norm=true", "train.global_batch=20"]
    whole = Job(here, configure, shared / "whole", *overrides)
    whole.part()
    one, two = (Job(here, configure, shared / name, *overrides) for name in ("one", "two"))

    def part(groups: list[list[int]], **how):
        here.comm.barrier()
        if here.comm.rank == 0 and one.directory.is_used():
            shutil.rmtree(two.directory.path, ignore_errors=True)
            shutil.copytree(one.directory.path, two.directory.path)
        mine = [here.comm.group(ranks) for ranks in groups]
        (number,) = (number for number, group in enumerate(mine) if group is not None)
        outcome = (one, two)[number].part(mine[number], **how)
        mine[number].close()
        here.comm.barrier()
        return outcome

    every = [[0, 1, 2, 3]]
    assert part(every, stop="SIGTERM", after=1).step == 2
    assert part([[0, 1], [2, 3]], stop="SIGTERM", after=2).step == 5
    # Step 6 ends an epoch, and the test after it detects the stop.
    assert part(every, stop="SIGTERM", after=1).step == 6
    assert isinstance(part([[0, 1, 2], [3]]), Outcome)
    assert_same_run(whole, one)
    assert_same_run(whole, two)
    resumed = [record for record in read(one.directory.metrics) if record["event"] == "resumed"]
    assert {record["reproducible"]["micro_shards"] for record in resumed} == {"4"}


@pytest.mark.ranks(1, 3)
def test_the_number_of_micro_shards_is_kept_from_the_start(here, configure, shared):
    job = Job(here, configure, shared / "run", "train.reproducible=true")
    job.config = settled(job.config, None, here.comm)
    assert job.config.train.micro_shards == {1: 1, 3: 4}[here.comm.size]
    assert isinstance(job.part(stop="SIGTERM", after=1), Stopped)
    here.comm.barrier()
    other = configure("train.reproducible=true")
    found = settled(other, job.directory, SerialCommunicator()).train.micro_shards
    assert found == job.config.train.micro_shards
    asked = configure("train.reproducible=true", "train.micro_shards=8")
    assert settled(asked, job.directory, here.comm) == asked
    plain = configure("train.global_batch=9")
    assert settled(plain, job.directory, here.comm) == plain


@pytest.mark.ranks(3)
def test_too_many_ranks_or_too_small_a_batch_is_rejected(here, configure):
    with pytest.raises(MismatchError, match="every rank must have a micro-shard"):
        build(configure("train.reproducible=true", "train.micro_shards=2"), here.comm)
    small = configure("train.reproducible=true", "train.global_batch=3")
    for refuse in (lambda: build(small, here.comm), lambda: settled(small, None, here.comm)):
        with pytest.raises(MismatchError, match=r"number of micro-shards, 4, .* got 3"):
            refuse()


def test_samples_of_different_lengths_are_rejected(here, configure):
    target = ["data.target=tests.train.problem:ragged_data", "data.input=words"]
    target.append("train.global_batch=8")
    with pytest.raises(MismatchError, match="samples must have one length"):
        build(configure("train.reproducible=true", *target), here.comm)
    changed = "data.transform=tests.train.problem:unchanged"
    task = build(configure("train.reproducible=true", *target, changed), here.comm)
    with pytest.raises(DataError, match="samples must have one length"):
        task.split(next(iter(task.train)))


def test_aligned_parts_are_the_micro_shards_with_samples():
    found = [part.tolist() for part in aligned_parts(torch.arange(2, 5), 5, 8, range(4, 8))]
    assert found == [[2], [3], [4]]
