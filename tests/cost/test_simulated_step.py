"""Simulated steps: what overlaps is hidden, what is late is waited for."""

import tracemalloc
from functools import partial
from time import process_time

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.cost.machine import Link, Machine
from hpctrain.cost.simulate import allreduce_times, two_level_times
from hpctrain.cost.simulated_step import Workload, simulate_steps

RING = partial(allreduce_times, "ring")
BUCKETS = (1 << 20,) * 10
MACHINE = Machine(nodes=8, network=Link(2e-6, 10e9))
SUM_S = float(RING(1 << 20, MACHINE).max())


def test_without_overlap_every_sum_is_exposed():
    work = Workload(compute_s=0.1, bucket_bytes=BUCKETS, overlapped=False)
    step = simulate_steps(work, MACHINE, RING)
    assert step.step_s == pytest.approx(0.1 + 10 * SUM_S)
    assert step.exposed_s == pytest.approx(10 * SUM_S)
    assert step.straggling_s == pytest.approx(0, abs=1e-12)
    assert step.efficiency == pytest.approx(0.1 / step.step_s)


def test_with_overlap_the_last_bucket_alone_is_exposed_until_the_network_is_the_limit():
    hidden = simulate_steps(Workload(compute_s=0.1, bucket_bytes=BUCKETS), MACHINE, RING)
    assert hidden.exposed_s == pytest.approx(SUM_S)
    # The first bucket is ready after a third of the time and a tenth of the rest.
    busy = simulate_steps(Workload(compute_s=1e-3, bucket_bytes=BUCKETS), MACHINE, RING)
    assert busy.step_s == pytest.approx((1 / 3 + 2 / 30) * 1e-3 + 10 * SUM_S)


def test_a_slow_node_sets_the_pace():
    machine = Machine(nodes=8, network=MACHINE.network, slow_fraction=0.125, slow_factor=2.0)
    step = simulate_steps(
        Workload(compute_s=0.1, bucket_bytes=BUCKETS), machine, RING, num_steps=5
    )
    assert step.compute_s == pytest.approx(0.1 * 9 / 8)
    assert step.compute_s + step.straggling_s == pytest.approx(0.2)
    assert step.step_s == pytest.approx(0.2 + SUM_S, rel=1e-3)


def test_jitter_costs_more_on_more_ranks_and_the_seed_decides():
    work = Workload(compute_s=0.1, bucket_bytes=(1 << 20,))

    def efficiency(nodes, seed=0):
        machine = Machine(nodes=nodes, network=MACHINE.network, jitter=0.1)
        collective = partial(allreduce_times, "halving")
        return simulate_steps(work, machine, collective, num_steps=10, seed=seed).efficiency

    assert efficiency(512) < efficiency(64) < efficiency(8)
    assert efficiency(8) == efficiency(8) != efficiency(8, seed=1)


BIG = Machine(nodes=1024, ranks_per_node=4, network=MACHINE.network, jitter=0.05)
HUNDRED = Workload(compute_s=0.3, bucket_bytes=(25 << 20,) * 100)


@pytest.mark.parametrize(
    "collective",
    [
        partial(two_level_times, "ring"),
        partial(allreduce_times, "halving"),
        pytest.param(RING, marks=pytest.mark.conformance),
    ],
    ids=("two levels", "halving", "ring"),
)
def test_hundred_buckets_on_4096_ranks_take_seconds(collective):
    start = process_time()
    simulate_steps(HUNDRED, BIG, collective)
    assert process_time() - start < 30


def test_hundred_buckets_on_4096_ranks_take_little_memory():
    tracemalloc.start()
    simulate_steps(HUNDRED, BIG, partial(allreduce_times, "halving"))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2e9


def test_a_workload_is_checked():
    with pytest.raises(ConfigError, match="compute_s=0"):
        Workload(compute_s=0, bucket_bytes=BUCKETS)
    with pytest.raises(ConfigError, match="a bucket has bytes"):
        Workload(compute_s=1, bucket_bytes=(5, 0))
    with pytest.raises(ConfigError, match="got 0"):
        simulate_steps(Workload(compute_s=1, bucket_bytes=BUCKETS), MACHINE, RING, num_steps=0)
