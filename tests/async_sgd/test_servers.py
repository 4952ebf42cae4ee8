"""Check that the serving thread of a rank sleeps without requests and ends with the methods."""

import gc
import re
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from hpctrain.comm.direct_messages import DirectMessages
from hpctrain.comm.request_thread import RequestThread
from hpctrain.core.errors import ConfigError, ReplicaError
from tests.gradients.training import LAST, MANY, ONE_NODE, TWO_NODES

NUM_METHODS = 40
SLEEPS = r"\nvoluntary_ctxt_switches:\s+(\d+)"


def made(hvd, make="StaleSynchronous", **options):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, getattr(hvd, make)(model, optimizer, **options)


def take_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def num_serving():
    return sum(thread.name == "hpctrain-server" for thread in threading.enumerate())


def num_wake_ups_in(seconds):
    """Count how often serving threads begin to sleep within ``seconds``."""
    served = [one for one in threading.enumerate() if one.name == "hpctrain-server"]
    files = [Path(f"/proc/self/task/{one.native_id}/status") for one in served]
    count = lambda: sum(int(re.search(SLEEPS, one.read_text())[1]) for one in files)  # noqa: E731
    before = count()
    time.sleep(seconds)
    return count() - before


def count_calls(monkeypatch, kind, name, counted):
    original = getattr(kind, name)

    def call(self):
        counted[name] += 1
        return original(self)

    monkeypatch.setattr(kind, name, call)


def all_end(world):
    """Return True if the serving threads of all ranks end within 20 s. Collective."""
    end = time.monotonic() + 20
    while num_serving() and time.monotonic() < end:
        time.sleep(0.01)
    return not any(world.allgather(num_serving()))


def stepped_at_rest(hvd, rests):
    """Make many methods, let some of them step after a rest, and end all methods. Collective."""
    methods = [made(hvd) for _ in range(NUM_METHODS)]
    assert num_serving() == 1
    hvd.barrier()
    # The thread may still be awake.
    assert any(rests() for _ in range(5))
    for model, optimizer, method in methods[::10]:
        take_step(model, optimizer)  # a doorbell wakes the thread
        method.settle()
    for _, _, method in methods[::2]:
        method.close()
    hvd.barrier()
    take_step(*methods[1][:2])
    methods[1][2].settle()
    for _, _, method in methods[1::2]:
        method.close()


@pytest.mark.ranks(2)
@ONE_NODE
def test_methods_at_rest_take_next_to_no_processor_time(hvd, world):
    """The thread does not wake up before a doorbell rings."""
    stepped_at_rest(hvd, lambda: num_wake_ups_in(1.5) == 0)
    assert all_end(world)


@pytest.mark.ranks(3)
@TWO_NODES
def test_methods_at_rest_on_two_nodes_are_polled_together(hvd, world, monkeypatch):
    """Each wake-up of the thread serves nearly all methods."""
    counted = Counter()
    count_calls(monkeypatch, RequestThread, "_poll", counted)
    count_calls(monkeypatch, DirectMessages, "poll", counted)

    def are_polled_together():
        counted.clear()
        time.sleep(1.5)
        return counted["poll"] >= NUM_METHODS / 2 * counted["_poll"] > 0

    stepped_at_rest(hvd, are_polled_together)
    assert all_end(world)


@MANY
@TWO_NODES
@pytest.mark.parametrize("end", ["block", "close", "garbage", "error"])
@pytest.mark.parametrize(
    ("make", "servers"), [("StaleSynchronous", None), ("AsyncSGD", 1), ("Downpour", None)]
)
def test_serving_threads_end_on_all_ranks_with_the_method(hvd, world, make, end, servers):
    gc.collect()
    assert all_end(world)
    model, optimizer, method = made(hvd, make, servers=servers)
    assert sum(world.allgather(num_serving())) == (servers or world.size)
    if end == "block":
        with method:
            if method.is_worker:
                take_step(model, optimizer)
        with pytest.raises(ConfigError, match="was closed"):
            method.skip_step()
    else:
        if method.is_worker:
            take_step(model, optimizer)
        method.settle()
        if end == "close":
            method.close()
            with pytest.raises(ConfigError, match="was closed"):
                method.settle()
        elif end == "error":
            with pytest.raises(ZeroDivisionError), method:
                _ = world.rank / 0
    del model, optimizer, method
    gc.collect()
    assert all_end(world)


@pytest.mark.ranks(3)
@ONE_NODE
@pytest.mark.parametrize("end", ["close", "garbage"])
def test_rank_whose_method_has_ended_still_serves_the_others(hvd, world, end):
    model, optimizer, method = made(hvd, staleness=1)
    if world.rank == 1:
        if end == "close":
            method.close()
        del model, optimizer, method
        gc.collect()
        world.barrier()
        assert num_serving() == 1
        world.barrier()
    else:
        world.barrier()
        for _ in range(4):  # beyond the bound of a rank that takes no step
            take_step(model, optimizer)
        world.barrier()
        del model, optimizer, method
        gc.collect()
    assert all_end(world)


@MANY
@LAST
@ONE_NODE
def test_results_of_a_deleted_method_are_compared_at_shutdown(hvd, world):
    model, optimizer, method = made(hvd)
    for _ in range(2 if world.rank else 1):
        take_step(model, optimizer)
    del model, optimizer, method
    gc.collect()
    assert all_end(world)
    with pytest.raises(ReplicaError, match="the number of steps of StaleSynchronous"):
        hvd.shutdown()
