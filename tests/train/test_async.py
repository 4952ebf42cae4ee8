"""Runs with parameter servers: equivalences, restored state, and rejected options."""

import os
import signal
import time

import pytest
import torch

from hpctrain.checkpoint.manager import Manager
from hpctrain.core.errors import ConfigError, MismatchError, NotFiniteError
from hpctrain.core.records import read
from hpctrain.train.async_exchange import SYNC_STEPS
from hpctrain.train.loop import Outcome, Stopped
from hpctrain.train.run_state import RunState
from tests.train.job import Job, assert_same_bits, assert_same_run

SMALL = ["model.target=tests.train.problem:model", "train.epochs=3"]
METHODS = {
    "ssp": ["sync.method=ssp", "sync.staleness=3"],
    "downpour": ["sync.method=downpour", "sync.args={n_push = 2, n_fetch = 3, rate = 0.05}"],
    "async": ["sync.method=async"],
}
EACH = pytest.mark.parametrize("method", METHODS)


@pytest.mark.ranks(1, 2)
def test_ssp_without_staleness_equals_the_synchronous_run_bitwise(here, configure, shared):
    ours, theirs = (Job(here, configure, shared / n, *SMALL) for n in ("ours", "theirs"))
    ours.config = configure(*ours.overrides, "sync.method=ssp", "sync.staleness=0")
    ours.part()
    theirs.part()
    assert_same_bits(ours.final(), theirs.final())


@pytest.mark.ranks(2)
def test_ssp_without_staleness_resumes_with_the_same_bits(here, configure, shared):
    overrides = [*SMALL, "sync.method=ssp", "sync.staleness=0", "checkpoint.every=3"]
    overrides += ["checkpoint.background=false", "log.hash_every=1"]
    whole = Job(here, configure, shared / "whole", *overrides)
    whole.part()
    parts = Job(here, configure, shared / "parts", *overrides)
    for after in (5, 8):
        with pytest.raises(KeyError):
            parts.part(after=after, fail=True)
    assert isinstance(parts.part(), Outcome)
    assert_same_run(whole, parts)


@pytest.mark.ranks(2, 3)
@EACH
def test_the_state_of_servers_is_restored_bitwise(here, configure, shared, method):
    job = Job(here, configure, shared / "run", *SMALL, "optimizer.name=SGD", *METHODS[method])
    slow = {4: lambda: time.sleep(0.05 * here.comm.rank)}
    assert isinstance(job.part(stop="SIGTERM", after=5, at=slow), Stopped)
    manager = Manager(job.directory.checkpoints, here.comm)
    saved = manager.load_latest()
    manager.close()
    assert saved.step % SYNC_STEPS == 0 or saved.step % 6 == 0
    task = job.built()
    state = RunState(task=task)
    state.restore(saved.state, saved.private[here.comm.rank])
    with task.exchange.settled():
        assert_same_bits(dict(task.model.state_dict()), saved.state["model"])
        now = task.exchange.shared_state()["sync"]["server"] or task.optimizer.state_dict()
        kept = saved.state["sync"]["server"] or saved.state["optimizer"]
        assert now["state"]
        assert_same_bits(now["state"], kept["state"])
    task.exchange.close()
    outcome = job.part()
    assert isinstance(outcome, Outcome)
    last = read(job.directory.metrics)[-1]
    assert (last["event"], last["step"]) == ("finished", 18)
    assert last["staleness"] >= 0
    assert method != "ssp" or last["staleness_most"] <= 3


@pytest.mark.ranks(2)
def test_a_stop_reaches_all_ranks_at_the_next_synchronization(here, configure, shared):
    overrides = ["sync.method=ssp", "train.epochs=1", "train.global_batch=2"]  # 27 steps
    ask = {3: lambda: os.kill(os.getpid(), signal.SIGTERM)} if here.comm.rank else {}
    job = Job(here, configure, shared / "run", *overrides)
    stopped = job.part(at=ask)
    assert isinstance(stopped, Stopped)
    assert stopped.step == SYNC_STEPS
    assert isinstance(job.part(), Outcome)


@pytest.mark.ranks(2)
@EACH
def test_another_number_of_ranks_can_restore_a_checkpoint(here, configure, shared, method):
    overrides = [*SMALL, *METHODS[method], "checkpoint.every=3", "checkpoint.background=false"]
    job = Job(here, configure, shared / "run", *overrides)
    with pytest.raises(KeyError):
        job.part(after=5, fail=True)
    manager = Manager(job.directory.checkpoints, here.comm)
    saved = manager.load_latest()
    manager.close()
    task = job.built()
    RunState(task=task).restore(saved.state, None)  # None: as if the number of ranks had changed
    with task.exchange.settled():
        assert_same_bits(dict(task.model.state_dict()), saved.state["model"])
    task.exchange.close()


@pytest.mark.ranks(1, 2)
def test_incompatible_options_are_rejected_at_the_start(here, configure, shared):
    for method in METHODS:
        for other in (
            "sync.compression=bf16",
            "train.shard=node",
            "train.reproducible=true",
            "train.ema=0.9",
            "train.clip_norm=1",
            "train.clip_value=1",
            "train.precision=fp16",
            "parallel.tp=2",
            "sync.args.servers=1",
            "sync.args.warmup_steps=3",
            "sync.staleness=-1",
        ):
            with pytest.raises(ConfigError):
                configure(f"sync.method={method}", other)
        with pytest.raises((ConfigError, MismatchError), match="unexpected"):
            Job(here, configure, shared / "x", f"sync.method={method}", "sync.args.n=1").built()


@pytest.mark.ranks(2)
def test_gradients_that_are_not_finite_end_the_run_on_all_ranks(here, configure, shared):
    job = Job(here, configure, shared / "run", *SMALL, "sync.method=ssp")
    task = job.built()

    def spoil() -> None:
        if here.comm.rank == 1:
            with torch.no_grad():
                next(task.model.parameters()).fill_(float("nan"))

    with pytest.raises(NotFiniteError):
        job.part(task=task, at={3: spoil, 4: spoil, 5: spoil, 6: spoil})
