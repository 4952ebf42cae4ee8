"""Named operations of thousands of ranks: messages, rounds, and the effect of faulty ranks."""

import math

import pytest

from hpctrain.comm.control_channel.mailbox import FAN_OUT, tree_of
from tests.harness.growth import slope
from tests.scale.engines import Engines, all_trees, node_lists
from tests.scale.network import Network

SIZES = pytest.mark.parametrize(
    "sizes", [(16, 64), pytest.param((64, 4096), marks=pytest.mark.conformance)]
)


def reduced(size, *, times=2, **faults):
    """Return engines that have executed an all-reduce; the messages of the last time are counted.

    The first time, the ranks send the name, and later a number.
    """
    engines = Engines(size, Network(size, seed=size))
    engines.network.slow = faults.get("slow", {})
    for _ in range(times):
        engines.network.forget()
        handles = engines.reduce("loss", faults.get("late", ()))
        assert all(handle.is_done for handle in handles)
    return engines


def test_trees_of_all_ranks_are_those_of_each_rank():
    for nodes in (node_lists(100, 7), node_lists(30, 1), [[3, 1], [0], [4, 2, 5]]):
        trees = all_trees(nodes)
        assert trees == {rank: tree_of(nodes, rank) for rank in trees}


@SIZES
@pytest.mark.parametrize("times", [1, 2], ids=["first", "later"])
def test_a_named_all_reduce_costs_two_messages_per_rank_and_a_logarithmic_time(sizes, times):
    seconds = []
    for size in sizes:
        traffic = reduced(size, times=times).network.traffic()
        assert traffic.num_messages == 2 * (size - 1)
        assert traffic.num_rounds <= 2 * math.ceil(math.log2(size))
        assert traffic.most_peers <= 1 + 2 * FAN_OUT
        assert traffic.num_bytes < (1000 if times == 1 else 4) * size
        seconds.append((size, round(1e9 * traffic.seconds)))
    assert slope(seconds) < 0.35


@pytest.mark.parametrize("faults", [{"slow": {5: 100.0}}, {"late": [63, 7]}, {"late": [0]}])
def test_slow_and_late_ranks_cost_no_further_messages(faults):
    usual, other = (reduced(64, **each).network.traffic() for each in ({}, faults))
    assert other.num_messages == usual.num_messages
    assert other.seconds > usual.seconds


def test_operations_wait_for_the_last_rank_and_run_in_one_order_on_all_ranks():
    size, names = 64, [f"t{number}" for number in range(8)]
    engines = Engines(size, Network(size, seed=3, jitter_s=1e-3))
    for last in names[:3]:
        handles = []
        for rank in engines.network.random.sample(range(size), size):
            for name in engines.network.random.sample(names, len(names)):
                handles += engines.submit(name, [rank] if (rank, name) != (17, last) else [])
        engines.network.run()
        assert all(handle.is_done == (handle.name != last) for handle in handles)
        handles += engines.submit(last, [17])
        engines.network.run()
        assert all(handle.is_done for handle in handles)
    first, *others = [executor.names for executor in engines.executors]
    assert len(first) == 3 * len(names)
    assert all(each == first for each in others)


def test_equal_seeds_give_equal_runs():
    def run(seed):
        engines = Engines(64, Network(64, seed=seed, jitter_s=1e-4))
        for name in "abc":
            engines.reduce(name, late=[engines.network.random.randrange(64)])
        return engines.messages, engines.network.traffic()

    assert run(1) == run(1)
    assert run(1) != run(2)
