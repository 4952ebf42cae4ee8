"""Messages of the package on many simulated ranks, by operation.

``python -m tests.scale.figures 64 512`` prints the figures.
"""

import math
from functools import lru_cache

import pytest
import torch

import hpctrain as hvd
from hpctrain.checkpoint.format.shard import Shard
from hpctrain.checkpoint.piece_plan import PiecePlan
from hpctrain.comm.control_channel.mailbox import FAN_OUT
from hpctrain.core.errors import MismatchError, RankLostError
from hpctrain.runtime.world import current
from tests.harness.growth import MAX_SLOPE, slope
from tests.scale import worlds
from tests.scale.figures import all_figures, death, failure, quiet, usual
from tests.scale.network import Network
from tests.scale.rank_threads import DeadlockError
from tests.scale.worlds import SimulatedWorld

MOST = {
    "first negotiation": 1,
    "negotiation": 1,
    "init": 18,
    "first named all-reduce": 3,
    "named all-reduce": 3,
    "DistributedOptimizer": 4.5,
    "first step": 4.5,
    "step": 4.5,
    "stop check": 2,
    "checkpoint save": 17,
    "checkpoint load": 10,
    "stop request": 4.5,
    "failure report": 2,
    "recovery": 40,
}
"""Bounds of the messages per rank, divided by log2(N), for any N."""
ONCE = {"init", "DistributedOptimizer", "stop request", "checkpoint load", "recovery"}
"""Operations, rare in a program, in which each rank receives some bytes of each other rank.

The manifest of a checkpoint, which all ranks receive, has an entry for each file."""

figures_of = lru_cache(all_figures)


def check(size):
    """Check the bounds of all operations of ``size`` ranks."""
    figures, log2 = figures_of(size), math.ceil(math.log2(size))
    assert figures.keys() == MOST.keys()
    for name, most in MOST.items():
        traffic = figures[name]
        assert 0 < traffic.per_rank(size) <= most * log2, name
        assert traffic.num_rounds <= 2 * most * log2, name
        assert traffic.most_peers <= max(2 * log2 + 2 * FAN_OUT, min(size, 64)), name
        if name != "failure report" or size > 64:
            assert traffic.most_messages <= 4 * most * log2, name


@pytest.mark.limit(120)
def test_messages_per_rank_are_logarithmic():
    check(64)


@pytest.mark.conformance
@pytest.mark.limit(900)
def test_messages_per_rank_grow_logarithmically():
    small, large = 64, 1024  # 4096 ranks take several minutes: `make scale`
    check(large)
    for name in MOST.keys() - {"failure report"}:  # 64 ranks report to each other directly
        few, many = (figures_of(size)[name] for size in (small, large))
        doubled = math.log2(large) / math.log2(small)
        assert many.per_rank(large) <= 1.1 * doubled * few.per_rank(small), name
        assert many.num_rounds <= 1.2 * doubled * few.num_rounds, name
        each = [(small, few.num_bytes // small), (large, many.num_bytes // large)]
        assert slope(each) < (MAX_SLOPE if name in ONCE else 0.4), name


def test_shared_objects_cost_the_messages_of_separate_ones(monkeypatch):
    separate = usual(13)
    monkeypatch.setattr(worlds, "EXACT", 2)
    for name, traffic in usual(13).items():
        assert traffic.num_messages == separate[name].num_messages, name
        assert traffic.num_bytes == pytest.approx(separate[name].num_bytes, rel=0.02), name
        assert traffic.most_peers == separate[name].most_peers, name


@pytest.mark.parametrize("copies", [1, 2])
def test_bytes_of_the_writers_of_pieces_grow_with_ranks_or_tensors_not_with_both(copies):
    """Let each tensor be divided among all ranks, or among pairs of ranks."""
    further = []
    for size in (16, 128):
        world = SimulatedWorld(size)

        def work(comm, size=size, world=world):
            world.init(comm)
            rows = Shard((size // copies, 2), (comm.rank // copies, 0), (1, 2))
            for num in (4, 68):
                pieces = {f"layers.{number}.weight": rows for number in range(num)}
                world.end_phase("before")
                plan = PiecePlan.of(current().comm, pieces, None)
                plan.require_same(dict.fromkeys(plan.compared, 7))
                world.end_phase(f"{num} tensors")

        with quiet():
            world.run(work)
        few, many = (world.traffic[f"{num} tensors"] for num in (4, 68))
        assert many.num_messages == few.num_messages
        # One more tensor adds two or four numbers to an all-reduce, in each of its rounds.
        further.append((many.num_bytes - few.num_bytes) / size / 64)
        assert further[-1] <= copies * 16 * math.log2(size)
    assert further[1] <= further[0] * 7 / 4


def test_equal_seeds_give_equal_figures():
    assert death(9, seed=3) == death(9, seed=3)


@pytest.mark.parametrize("size", [6, 33])
def test_values_of_simulated_ranks_are_correct(size):
    world = SimulatedWorld(size)

    def work(comm):
        world.init(comm)
        summed = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, name="x")
        everyone = hvd.allgather_object(hvd.rank() ** 2)
        return summed.item(), everyone, hvd.broadcast_object(str(hvd.rank()), root_rank=size - 1)

    with quiet():
        found = world.run(work)
    expected = (sum(range(size)), [rank**2 for rank in range(size)], str(size - 1))
    assert found == [expected] * size


def test_a_late_rank_delays_all_ranks_and_a_slow_rank_each_message():
    def seconds(late_s=0.0, slow=1.0):
        network = Network(33)
        network.slow, world = {7: slow}, SimulatedWorld(33, network)

        def work(comm):
            world.init(comm)
            world.end_phase("init")
            if comm.rank == 7:
                network.clocks[7] += late_s
            hvd.allreduce(torch.ones(1), name="x")
            world.end_phase("all-reduce")

        with quiet():
            world.run(work)
        return world.traffic["all-reduce"].seconds

    usual_s = seconds()
    assert 1.0 < seconds(late_s=1.0) < 1.0 + 2 * usual_s
    assert 2 * usual_s < seconds(slow=100.0)


def test_a_rank_that_differs_raises_on_all_simulated_ranks():
    world = SimulatedWorld(70)

    def work(comm):
        world.init(comm)
        with pytest.raises(
            hvd.HorovodInternalError, match=r"on ranks 0-16,18-69 and .* on rank 17"
        ):
            hvd.allreduce(torch.ones(2 if comm.rank == 17 else 1), name="x")
        with pytest.raises(MismatchError, match="rank 17: not this one"):
            current().comm.agree(ok=comm.rank != 17, message="not this one")
        return True

    with quiet():
        assert all(world.run(work))


def test_the_death_of_a_rank_without_recovery_is_an_error_on_its_host():
    world = SimulatedWorld(70, patience_s=2.0)

    def work(comm):
        world.init(comm)
        if comm.rank == 66:
            world.kill(66)
        with pytest.raises(RankLostError, match=r"rank 66 .* died"):
            hvd.allreduce(torch.ones(1), name="x")

    with quiet(), pytest.raises(DeadlockError):  # ranks 0 to 63 wait for the launcher to end them
        world.run(work)
    ended = [rank for rank, result in enumerate(world.threads.results) if result is None]
    assert ended == [64, 65, 67, 68, 69]


def test_a_failure_is_reported_with_the_rank_on_which_it_occurred():
    # Above 64 ranks, most ranks receive the report from a rank that has not failed itself.
    traffic = failure(80)["failure report"]
    assert traffic.num_rounds <= math.ceil(math.log2(80))
