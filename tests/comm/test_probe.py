"""Check the probe: all ranks choose the same plan within the time budget; sums stay exact."""

import time
from functools import partial

import pytest
import torch

from hpctrain.comm.plan.choice import BATCHING_SIZES, SIZES, Batching
from hpctrain.comm.plan.probe import Stopwatch, measure
from hpctrain.comm.waiting import Watch
from hpctrain.core.config import Settings
from hpctrain.core.errors import CommError, RankLostError
from tests.comm.conftest import connected

FOR_EVER_S = 3600.0


@pytest.fixture(params=[None, 1, 2], ids=["one node", "nodes of one", "nodes of two"])
def connection(request):
    with connected(Settings(probe="off", ranks_per_node=request.param)) as made:
        yield made


@pytest.mark.ranks(2, 3, 4)
def test_all_ranks_choose_the_same_plan_and_use_it(world, connection):
    plan = measure(connection.comm, world, connection.plan, Watch(), FOR_EVER_S)
    assert set(world.allgather(plan)) == {plan}
    kinds = {"tensors", "rail"} if plan.num_rails else {"tensors"}
    assert {m.what for m in plan.measured} == kinds
    for what in kinds:
        assert {m.num_bytes for m in plan.measured if m.what == what} == set(SIZES[what])
        assert len(plan.measurements(what)) == 1 + len(SIZES[what])
    assert all(m.seconds > 0 for m in plan.measured)
    assert plan.num_rails or not plan.chunk_bytes
    assert connection.comm.plan == plan
    for numel in (1, 1000, 300_000):
        tensor = torch.full((numel,), float(world.rank))
        connection.comm.allreduce_(tensor).wait()
        assert tensor.eq(sum(range(world.size))).all()


@pytest.mark.ranks(2, 3, 4)
def test_fusion_and_cycle_follow_from_measurements(world, connection, monkeypatch):
    timed = []
    monkeypatch.setattr(
        "hpctrain.comm.plan.probe.batching",
        lambda times: timed.append(times) or Batching(12, 3e-4),
    )
    plan = measure(connection.comm, world, connection.plan, Watch(), FOR_EVER_S)
    assert (plan.fusion_bytes, plan.cycle_s) == (12, 3e-4)
    assert [set(times) for times in timed] == [set(BATCHING_SIZES)]
    assert world.allgather(timed[0]) == world.size * timed


@pytest.mark.ranks(2, 3, 4)
def test_sizes_beyond_the_budget_keep_the_rule(world, connection):
    plan = measure(connection.comm, world, connection.plan, Watch(), budget_s=1e-9)
    assert (plan.tensors, plan.rail) == (connection.plan.tensors, connection.plan.rail)
    assert len(plan.measured) <= 1  # the duration of a run is unknown before the first one


@pytest.mark.ranks(2, 3, 4)
def test_an_algorithm_that_fails_anywhere_is_dropped_everywhere(world, connection, monkeypatch):
    comm = connection.comm
    sound = comm.allreduce_by

    def fails_here(way, tensor, **options):
        if way == "library":
            raise CommError("no memory for this") if comm.rank == 0 else MemoryError
        return sound(way, tensor, **options)

    monkeypatch.setattr(comm, "allreduce_by", fails_here)
    plan = measure(comm, world, connection.plan, Watch(), FOR_EVER_S)
    measured = {m.algorithm for m in plan.measured if m.what == "tensors"}
    assert "library" not in measured
    assert measured


@pytest.mark.ranks(2, 3, 4)
def test_time_is_that_of_the_slowest_rank_and_none_after_a_failure(world):
    def run(error=None):
        world.Barrier()
        if world.rank == world.size - 1:
            time.sleep(0.02)
            if error is not None:
                raise error

    stopwatch = Stopwatch(world, Watch())
    seconds = stopwatch.time(run, 2)
    assert seconds >= 0.02
    assert len(set(world.allgather(seconds))) == 1
    assert stopwatch.time(partial(run, CommError("no memory for this")), 1) is None
    assert stopwatch.time(lambda: None, 1) >= 0


@pytest.mark.ranks(2)
def test_a_lost_rank_is_not_a_slow_algorithm(world):
    def run():
        raise RankLostError("rank 1 died")

    with pytest.raises(RankLostError):
        Stopwatch(world, Watch()).time(run, 1)
