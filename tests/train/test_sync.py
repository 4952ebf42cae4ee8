"""Runs with local methods have the same bits when they are stopped and resumed anywhere."""

import os
import signal
import time
from contextlib import suppress
from itertools import pairwise

import pytest
import torch

from hpctrain.checkpoint.manager import Manager
from hpctrain.core.errors import CheckpointError, ConfigError, HpctrainError
from hpctrain.core.records import read
from hpctrain.data.tools.label_split import LabelShares, split_by_label
from hpctrain.local_sgd.federated import Draw
from hpctrain.local_sgd.staged_sgd import StagedSGD
from hpctrain.train import local_exchange
from hpctrain.train.history import RunHistory
from hpctrain.train.loop import Outcome, Stopped
from hpctrain.train.run_report import write_report
from hpctrain.train.run_state import RunState
from hpctrain.train.task import build
from tests.train.job import Job, assert_same_bits, assert_same_checkpoint, assert_same_run

NOISY = ["model.target=tests.train.problem:noisy_model", "checkpoint.background=false"]
TWO, FOUR = pytest.mark.ranks(2), pytest.mark.ranks(4)
LONG = pytest.mark.conformance


def local(method: str, *overrides: str) -> list[str]:
    return [*NOISY, "train.epochs=3", f"sync.method={method}", "sync.steps=4", *overrides]


CASES = [
    pytest.param(local("local_sgd", "sync.compression=bf16"), id="local bf16", marks=TWO),
    pytest.param(local("local_sgd", "sync.args.state=average"), id="average", marks=(TWO, LONG)),
    pytest.param(
        local("local_sgd", "sync.fraction=0.5", "optimizer.name=AdamW"), id="drawn", marks=TWO
    ),
    pytest.param(local("post_local_sgd", "sync.args.start_epochs=0.8"), id="post", marks=TWO),
    pytest.param(
        local("hierarchical_local_sgd", "sync.steps=8", "sync.args.node_steps=2"),
        id="hierarchical, local in the node",
        marks=FOUR,
    ),
    pytest.param(
        local("diloco", "sync.args={fragments = 2, delay = 2}", "optimizer.name=AdamW"),
        id="diloco, in parts, late",
        marks=FOUR,
    ),
    pytest.param(
        local("staged_sgd", "sync.args={warmup_epochs = 0.5, cooldown_epochs = 0.5, delay = 2}"),
        id="staged",
        marks=FOUR,
    ),
    pytest.param([*NOISY, "train.epochs=3", "sync.compression=one_bit"], id="bits", marks=FOUR),
    pytest.param(
        local("diloco", "sync.compression=top_k", "sync.compression_args.density=0.1"),
        id="diloco, the largest",
        marks=FOUR,
    ),
]


@pytest.mark.limit(120)
@pytest.mark.parametrize("overrides", CASES)
def test_a_run_that_failed_within_a_round_ends_with_the_same_bits(
    here, configure, shared, overrides
):
    if "optimizer.name=AdamW" in overrides:
        overrides = [*overrides, "optimizer.args={}"]
    overrides = [*overrides, "checkpoint.every=3", "log.hash_every=1"]
    whole = Job(here, configure, shared / "whole", *overrides)
    whole.part()
    parts = Job(here, configure, shared / "parts", *overrides)
    for after in (5, 8):  # resumes from step 3, and then from step 9
        with suppress(KeyError):
            parts.part(after=after, fail=True)
    assert isinstance(parts.part(), Outcome)
    assert_same_run(whole, parts)
    assert_same_checkpoint(whole, parts)
    records = read(parts.directory.metrics)
    assert [r["step"] for r in records if r["event"] == "resumed"] == [3, 9]


@pytest.mark.ranks(2, 3)
def test_drawn_ranks_train_on_their_own_parts_also_after_a_resume(here, configure, shared):
    """A forward hook shows that ranks that are not drawn do not compute."""
    build(configure(), here.comm)  # writes the data
    shares = LabelShares(num_parts=4, alpha=1.0)
    split = split_by_label(shared / "d", shared / "c.npz", shares, here.comm).split
    overrides = local("local_sgd", "sync.fraction=0.5", "sync.proximal=0.1")
    # with a batch norm, batches would need at least two samples
    overrides += ["model.args.norm=false", f"data.split={shared}/c.npz"]
    overrides += ["checkpoint.every=3", "log.hash_every=1"]
    whole = Job(here, configure, shared / "whole", *overrides)
    seen: list[tuple[bool, int]] = []
    task = whole.built()

    def look(_, batch) -> None:
        samples = task.train.samples_at(task.train.place)
        own = split.parts_of(here.comm.rank, here.comm.size)
        assert all(split.parts[number] in own for number in samples)
        assert len(batch[0]) == len(samples)
        seen.append((task.exchange.takes_part, task.exchange.method.rounds.number))

    hook = lambda *args: look(*args) if task.model.training else None  # noqa: E731
    task.model.register_forward_pre_hook(hook)
    whole.part(task=task)
    assert {takes_part for takes_part, _ in seen} <= {True}
    of_ranks = here.comm.allgather_object({number for _, number in seen})
    draws = Draw(0, here.comm.size, 0.5, whole.config.seed)
    for number in set().union(*of_ranks):
        assert [r for r, of in enumerate(of_ranks) if number in of] == draws.ranks(number)
    parts = Job(here, configure, shared / "parts", *overrides)
    for after in (5, 8):
        with suppress(KeyError):
            parts.part(after=after, fail=True)
    assert isinstance(parts.part(), Outcome)
    assert_same_run(whole, parts)
    assert_same_checkpoint(whole, parts)


@pytest.mark.ranks(2)
def test_invalid_federated_options_are_rejected(here, configure):
    for overrides, message in (
        (["sync.fraction=0.5"], "with sync.method = synchronous, got"),
        (["sync.method=ssp", "sync.fraction=0.5"], "got {'sync.fraction': 0.5, 'sync.proximal'"),
        (["sync.method=local_sgd", "sync.args={seed = 5}"], "seed of the run is used, got 5"),
        (["sync.method=staged_sgd", "sync.proximal=1"], "with sync.method = staged_sgd, got"),
        (["sync.method=local_sgd", "sync.fraction=1.5"], "at most 1, got 1.5"),
        (
            ["sync.method=local_sgd", "sync.args={fraction = 0.5}"],
            "fraction, proximal, got .*; write them in",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            configure(*overrides)
    for overrides, message in (
        (["sync.method=hierarchical_local_sgd", "sync.fraction=0.5"], "leave fraction out"),
        (["sync.method=diloco", "sync.fraction=0.5", "sync.args={delay = 1}"], "delay=1"),
        (["data.split=none.npz"], "cannot read the split none.npz"),
    ):
        with pytest.raises(HpctrainError, match=message):
            build(configure(*overrides), here.comm)


@pytest.mark.ranks(2)
def test_ranks_communicate_only_at_the_ends_of_rounds_and_epochs(
    here, configure, shared, monkeypatch
):
    monkeypatch.setattr(local_exchange, "WITHIN_S", 1e9)

    def sent_by(job: Job) -> list[int]:
        totals: list[int] = []
        look = lambda: totals.append(sum(here.comm.traffic()[:2]))  # noqa: E731
        job.part(at=dict.fromkeys(range(1, 19), look))
        totals = [sum(each) for each in zip(*here.comm.allgather_object(totals), strict=True)]
        return [later - earlier for earlier, later in pairwise(totals)]

    plain = Job(here, configure, shared / "plain", "train.epochs=3", "checkpoint.every=none")
    assert all(sent_by(plain))
    job = Job(here, configure, shared / "run", *local("local_sgd"), "checkpoint.every=none")
    sent = sent_by(job)
    # the first step, and the ends of rounds and epochs
    assert [step for step, num in enumerate(sent, 1) if num] == [1, 4, 6, 8, 12, 16]
    steps = [r for r in read(job.directory.metrics) if r["event"] == "step"]
    assert [record["step"] for record in steps] == [4, 6, 8, 12, 16, 18]
    assert [record["rounds"] for record in steps] == [1, 1, 2, 3, 4, 4]
    assert {record["sync_steps"] for record in steps} == {4}
    last = read(job.directory.metrics)[-1]
    assert (last["rounds"], last["event"]) == (5, "finished")
    assert last["drift"] > 0
    assert last["bytes_saved"] > last["bytes_sent"] > 0


@pytest.mark.ranks(2)
def test_a_stop_within_a_long_round_reaches_all_ranks_after_about_a_second(
    here, configure, shared
):
    overrides = ["sync.method=local_sgd", "sync.steps=1000", "train.epochs=1"]
    overrides += ["train.global_batch=2"]  # 27 steps
    slow = dict.fromkeys(range(1, 28), lambda: time.sleep(0.1))
    if here.comm.rank == 1:
        slow[4] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    job = Job(here, configure, shared / "run", *overrides)
    stopped = job.part(at=slow)
    assert isinstance(stopped, Stopped)
    assert stopped.reason == "SIGTERM"
    assert 4 <= stopped.step < 27  # not at the end of the epoch
    assert isinstance(job.part(), Outcome)


@pytest.mark.ranks(2)
def test_a_checkpoint_has_the_mean_and_each_replica_if_they_differ(here, configure, shared):
    overrides = local("post_local_sgd", "sync.args.start_epochs=0.7", "checkpoint.every=2")
    job = Job(here, configure, shared / "run", *overrides)
    found = []
    # the checkpoint of step 2 has identical replicas, that of step 6 is within a round
    for after in (3, 5):
        with suppress(KeyError):
            job.part(after=after, fail=True)
        manager = Manager(job.directory.checkpoints, here.comm)
        loaded = manager.load_latest()
        manager.close()
        found.append((loaded.step, loaded.state, loaded.private.get(here.comm.rank)))
    (early, _, own_early), (late, state, own) = found
    assert (early, late) == (2, 6)
    assert own_early["replica"] is None
    num_samples, nominal, *_ = own["sync"]["samples"][0]  # samples since the last average
    assert num_samples > 0
    weight = num_samples / nominal
    total = sum(here.comm.allgather_object(weight))
    for name, parameter in own["replica"]["parameters"].items():
        mean = parameter * weight
        here.comm.allreduce_(mean, scale=1 / total).wait()
        assert not torch.equal(parameter, mean)
        assert torch.equal(state["model"][name], mean)
    momenta = [values["momentum_buffer"] for values in state["optimizer"]["state"].values()]
    owned = [v["momentum_buffer"] for v in own["replica"]["optimizer"]["state"].values()]
    for mean, part in zip(momenta, owned, strict=True):
        assert not torch.equal(mean, part)


@pytest.mark.ranks(2)
def test_optimizer_state_missing_on_a_rank_is_not_averaged(here, configure, shared):
    """The last batch of an epoch has one sample, and the optimizer state has just been reset."""
    overrides = ["sync.method=local_sgd", "sync.steps=4", 'sync.args={state = "reset"}']
    overrides += ["train.epochs=1", "train.global_batch=13", "checkpoint.background=false"]
    job = Job(here, configure, shared / "run", *overrides, "checkpoint.every=5")
    assert isinstance(job.part(), Outcome)
    manager = Manager(job.directory.checkpoints, here.comm)
    states = manager.load_latest().state["optimizer"]["state"]
    manager.close()
    assert states == {}


@pytest.mark.ranks(4)
def test_staged_sgd_gets_the_loss_of_each_epoch_also_after_a_resume(
    here, configure, shared, monkeypatch
):
    output: list[float] = []
    observe = StagedSGD.observe
    monkeypatch.setattr(
        StagedSGD, "observe", lambda self, loss: (output.append(loss), observe(self, loss))
    )
    overrides = local("staged_sgd", "log.every_steps=6", "checkpoint.every=4")
    whole = Job(here, configure, shared / "whole", *overrides)
    whole.part()
    of_whole = output.copy()
    losses = [r["loss"] for r in read(whole.directory.metrics) if r["event"] == "step"]
    assert of_whole == pytest.approx(losses, rel=1e-14)
    assert len(of_whole) == 3
    output.clear()
    parts = Job(here, configure, shared / "parts", *overrides)
    with suppress(KeyError):
        parts.part(after=5, fail=True)  # resumes from step 4, in the first epoch
    parts.part()
    assert output == of_whole


def test_a_run_cannot_resume_with_another_method(here, configure):
    plain = RunState(task=build(configure(), here.comm))
    other = RunState(task=build(configure("sync.method=diloco"), here.comm))
    state, own = plain.shared(), plain.own()
    with pytest.raises(CheckpointError, match=r"'synchronous', as in .*, but it is 'diloco'"):
        other.restore(state, own)


def test_checkpoints_of_versions_without_sync_methods_can_be_read(here, configure):
    states = [RunState(task=build(configure(f"seed={seed}"), here.comm)) for seed in (1, 2)]
    shared, own = states[0].shared(), states[0].own()
    for name in ("sync", "epoch_tally"):
        del shared[name]
    for name in ("sync", "epoch_tally", "replica"):
        del own[name]
    states[1].restore(shared, own)
    assert_same_bits(*(dict(state.task.model.state_dict()) for state in states))


@FOUR
def test_records_and_the_report_have_the_savings_of_compression(here, configure, shared):
    job = Job(here, configure, shared / "run", "sync.compression=int8", "train.epochs=1")
    job.part()
    plain = Job(here, configure, shared / "plain", "train.epochs=1")
    plain.part()
    steps = [r for r in read(job.directory.metrics) if r["event"] == "step"]
    assert not any("won_s" in record for record in read(plain.directory.metrics))
    for record in steps:
        assert record["rail_bytes"] > 0
        assert record["node_bytes"] > 0
        assert 0.1 < record["ratio"] < 4.0
        assert record["won_s"] is None or abs(record["won_s"]) < 10
    if here.comm.rank == 0:
        history = RunHistory.read(job.directory.path)
        assert history.savings["rail_bytes"] == pytest.approx(
            sum(record["rail_bytes"] for record in steps) / len(steps)
        )
        assert "times less than without compression" in history.savings_text
        assert not RunHistory.read(plain.directory.path).savings_text
        page = write_report([history], shared / "page.html").read_text()
        assert "Bytes between nodes" in page
        assert "between nodes, a step" in page
