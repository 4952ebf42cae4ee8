"""Check a step in closed form: slow ranks, overlap with backward, local steps."""

import math
import tracemalloc
from dataclasses import astuple, replace
from time import process_time

import numpy as np
import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.core.units import MIB
from hpctrain.cost.collectives import AllreduceSpec, allreduce
from hpctrain.cost.machine import Link, Machine
from hpctrain.cost.schedules import SCHEDULES
from hpctrain.cost.step import (
    Model,
    allreduce_times,
    lateness,
    least_step_s,
    simulate_steps,
    step_time,
)

MACHINE = Machine(nodes=8, ranks_per_node=4, network=Link(5e-6, 1e9))
MODEL = Model(parameters=25e6, samples_per_s=100, rank_batch=32, overlap=False)
RING = AllreduceSpec("ring", rails=4)


@pytest.mark.parametrize("ranks", [2, 16, 128, 1024])
def test_the_delay_of_the_slowest_rank_equals_a_simulation(ranks):
    machine = Machine(nodes=ranks, jitter=0.1)
    times = np.exp(0.1 * np.random.default_rng(0).normal(size=(4000, ranks)))
    assert lateness(machine) == pytest.approx(times.max(axis=1).mean(), rel=0.02)


def test_luck_evens_out_between_averagings():
    machine = Machine(nodes=32, jitter=0.1)
    times = np.exp(0.1 * np.random.default_rng(0).normal(size=(2000, 32, 16))).mean(axis=2)
    assert lateness(machine, 16) == pytest.approx(times.max(axis=1).mean(), rel=0.02)
    assert lateness(machine, 16) < lateness(machine)


def test_one_slow_node_holds_up_all_and_more_nodes_have_one_more_likely():
    few, many = (Machine(nodes=n, slow_fraction=0.01, slow_factor=3) for n in (2, 1000))
    assert lateness(few) == pytest.approx(1 + 2 * (1 - 0.99**2))
    assert lateness(many) == pytest.approx(3, rel=1e-3)


def test_without_overlap_a_step_computes_then_sums():
    found = step_time(MACHINE, replace(MODEL, bucket_bytes=math.inf), 32, RING)
    assert found.compute_s == 0.32
    assert found.exposed_s == pytest.approx(allreduce(MACHINE, 1e8, RING).seconds(MACHINE))
    assert found.total_s == found.compute_s + found.exposed_s
    assert found.efficiency == found.compute_s / found.total_s


def test_backward_hides_all_but_the_last_bucket_and_no_more_than_it_lasts():
    slow, fast = (replace(MACHINE, network=Link(0, rate)) for rate in (1e8, 1e11))
    for machine in (slow, fast):
        whole = step_time(machine, MODEL, 32, RING).exposed_s
        left = step_time(machine, replace(MODEL, overlap=True), 32, RING).exposed_s
        buckets = math.ceil(1e8 / (25 * MIB))
        hidden = min(MODEL.backward * 0.32 * (1 - 1 / buckets), whole * (1 - 1 / buckets))
        assert left == pytest.approx(whole - hidden)
    # With samples in sequence, only the last backward overlaps with sums.
    twice = step_time(slow, replace(MODEL, overlap=True), 64, RING).exposed_s
    assert twice == step_time(slow, replace(MODEL, overlap=True), 32, RING).exposed_s


def test_each_local_step_costs_its_part_of_an_averaging():
    model = replace(MODEL, overlap=True)
    whole = step_time(MACHINE, MODEL, 32, RING).exposed_s
    assert step_time(MACHINE, model, 32, RING, local_steps=8).exposed_s == whole / 8


def test_a_model_without_parameters_is_rejected():
    with pytest.raises(ConfigError, match="got 0"):
        simulate_steps(MACHINE, MODEL, 1, RING, num_steps=0)
    with pytest.raises(ConfigError, match="backward must be at most 1, got 2"):
        replace(MODEL, backward=2)
    with pytest.raises(ConfigError, match="samples_per_s must be above 0, got 0"):
        Model(parameters=1, samples_per_s=0)


# By events: ten buckets of 1 MiB, a second of computing for ten samples.
BUCKETS = Model(parameters=10 * MIB / 4, samples_per_s=1e3, rank_batch=100, bucket_bytes=MIB)
FLAT = Machine(nodes=8, network=Link(2e-6, 10e9))
SUM_S = float(allreduce_times(AllreduceSpec("ring"), MIB, FLAT).max())


def test_simulated_without_overlap_every_sum_is_exposed():
    step = simulate_steps(FLAT, replace(BUCKETS, overlap=False), 100, AllreduceSpec("ring"))
    assert step.total_s == pytest.approx(0.1 + 10 * SUM_S)
    assert step.exposed_s == pytest.approx(10 * SUM_S)
    assert step.waiting_s == pytest.approx(0, abs=1e-12)


def test_simulated_the_last_bucket_alone_is_exposed_until_the_network_is_the_limit():
    hidden = simulate_steps(FLAT, BUCKETS, 100, AllreduceSpec("ring"))
    assert hidden.exposed_s == pytest.approx(SUM_S)
    # The first bucket is ready after a third of the time and a tenth of the rest.
    busy = simulate_steps(FLAT, BUCKETS, 1, AllreduceSpec("ring"))
    assert busy.total_s == pytest.approx((1 / 3 + 2 / 30) * 1e-3 + 10 * SUM_S)


@pytest.mark.parametrize("codec", ["none", "bf16", "int8:1:2e-10"])
@pytest.mark.parametrize("local_steps", [1, 4])
@pytest.mark.parametrize("share", [1, 100])
def test_a_simulated_step_takes_what_the_closed_form_says(codec, local_steps, share):
    spec, machine = AllreduceSpec("halving", 2, codec), replace(MACHINE, reduce_bytes_per_s=1e10)
    output, found = (
        each(machine, BUCKETS, share, spec, local_steps=local_steps)
        for each in (step_time, simulate_steps)
    )
    assert astuple(found) == pytest.approx(astuple(output), rel=1e-9)


def test_a_slow_node_sets_the_pace():
    machine = replace(FLAT, slow_fraction=0.125, slow_factor=2.0)
    step = simulate_steps(machine, BUCKETS, 100, AllreduceSpec("ring"), num_steps=5)
    assert step.compute_s + step.waiting_s == pytest.approx(0.2)
    assert step.total_s == pytest.approx(0.2 + SUM_S, rel=1e-3)


def test_jitter_costs_more_on_more_ranks_less_between_averagings_and_the_seed_decides():
    model = replace(BUCKETS, bucket_bytes=math.inf)

    def waiting_s(nodes, seed=0, **how):
        machine = Machine(nodes=nodes, network=FLAT.network, jitter=0.1)
        step = simulate_steps(
            machine, model, 100, AllreduceSpec("halving"), num_steps=64, seed=seed, **how
        )
        output = step_time(machine, model, 100, AllreduceSpec("halving"), **how)
        assert step.waiting_s == pytest.approx(output.waiting_s, rel=0.2)
        return step.waiting_s

    assert waiting_s(512) > waiting_s(64) > waiting_s(8)
    assert waiting_s(64, local_steps=16) < waiting_s(64) / 2
    assert waiting_s(8) == waiting_s(8) != waiting_s(8, seed=1)


BIG = Machine(nodes=1024, ranks_per_node=4, network=FLAT.network, jitter=0.05)
HUNDRED = Model(parameters=100 * 25 * MIB / 4, samples_per_s=10, rank_batch=3)


@pytest.mark.parametrize(
    "spec",
    [
        AllreduceSpec("ring", 2),
        AllreduceSpec("halving"),
        pytest.param(AllreduceSpec("ring"), marks=pytest.mark.conformance),
    ],
    ids=str,
)
def test_hundred_buckets_on_4096_ranks_take_seconds_and_little_memory(spec):
    assert HUNDRED.num_buckets == 100
    start = process_time()
    simulate_steps(BIG, HUNDRED, 3, spec)
    assert process_time() - start < 30
    if spec == AllreduceSpec("halving"):
        tracemalloc.start()
        simulate_steps(BIG, HUNDRED, 3, spec)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 2e9


def test_no_step_goes_below_the_least_one():
    for nodes in (1, 2, 8, 64):
        for rate in (1e7, 1e9, 1e11):
            machine = replace(MACHINE, nodes=nodes, network=Link(5e-6, rate))
            for name in SCHEDULES:
                step = step_time(machine, replace(MODEL, overlap=True), 32, AllreduceSpec(name, 4))
                moved = 2 * (nodes - 1) * MODEL.num_bytes
                assert step.total_s >= least_step_s(machine, 0.32, network_bytes=moved)


def test_the_least_step_is_computing_or_rounds_and_bytes_of_the_level_that_takes_longest():
    machine = Machine(nodes=4, ranks_per_node=2, node=Link(1, 1e6), network=Link(3, 1e6), nics=2)
    assert least_step_s(machine, 100) == 100
    assert least_step_s(machine, 0) == 2 * 3  # four nodes have a sum after two messages
    assert least_step_s(machine, 0, network_bytes=80e6) == 6 + 10
    assert least_step_s(machine, 0, network_bytes=80e6, node_bytes=400e6) == 1 + 50
