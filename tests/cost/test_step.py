"""Laws of a step in closed form: stragglers, what backward hides, local steps."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.core.units import MIB
from hpctrain.cost.collectives import Way, allreduce
from hpctrain.cost.machine import Link, Machine
from hpctrain.cost.step import BACKWARD, Model, lateness, step_time

MACHINE = Machine(nodes=8, ranks_per_node=4, network=Link(5e-6, 1e9))
MODEL = Model(parameters=25e6, samples_per_s=100, rank_batch=32, overlap=False)
RING = Way("ring", rails=4)


@pytest.mark.parametrize("ranks", [2, 16, 128, 1024])
def test_the_slowest_of_many_is_as_late_as_in_a_simulation(ranks):
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
        hidden = min(BACKWARD * 0.32 * (1 - 1 / buckets), whole * (1 - 1 / buckets))
        assert left == pytest.approx(whole - hidden)
    # Of samples taken one after the other, only the last ones' backward has sums beside it.
    twice = step_time(slow, replace(MODEL, overlap=True), 64, RING).exposed_s
    assert twice == step_time(slow, replace(MODEL, overlap=True), 32, RING).exposed_s


def test_of_local_steps_each_pays_its_part_of_an_averaging():
    model = replace(MODEL, overlap=True)
    whole = step_time(MACHINE, MODEL, 32, RING).exposed_s
    assert step_time(MACHINE, model, 32, RING, local_steps=8).exposed_s == whole / 8


def test_a_model_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="samples_per_s of a model must be above 0, got 0"):
        Model(parameters=1, samples_per_s=0)
