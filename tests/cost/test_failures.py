"""Check closed forms of failures against simulated runs, and Daly's best interval."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.cost.failures import best_interval, goodput, simulate_run
from hpctrain.cost.machine import Machine

DAY_S = 86400.0
FAILING = Machine(nodes=1000, mtbf_s=5 * 365 * DAY_S, checkpoint_s=120.0, restart_s=300.0)
MEAN_S = FAILING.mtbf_s / FAILING.nodes


@pytest.mark.parametrize("restart_s", [0.0, 600.0])
@pytest.mark.parametrize("nodes", [10, 1000, 10_000])
@pytest.mark.parametrize("checkpoint_s", [5.0, 60.0, 600.0])
def test_no_interval_saves_more_of_simulated_failures_than_the_best_one(
    checkpoint_s, nodes, restart_s
):
    machine = replace(FAILING, nodes=nodes, checkpoint_s=checkpoint_s, restart_s=restart_s)
    mean_s = machine.mtbf_s / nodes
    best_s = best_interval(machine)
    # Stratified samples of the times between failures make the average smooth in the interval.
    ranges = (np.arange(100_000) + np.random.default_rng(0).random(100_000)) / 100_000
    running_s = np.maximum(0.0, -np.log1p(-ranges) * mean_s - restart_s)
    intervals = best_s * np.geomspace(0.5, 2, 81)
    saved_s = [(running_s // (each + checkpoint_s)).sum() * each for each in intervals]
    assert best_s == pytest.approx(intervals[int(np.argmax(saved_s))], rel=0.05)
    if checkpoint_s / (2 * mean_s) < 1e-3:
        assert best_s == pytest.approx(math.sqrt(2 * checkpoint_s * mean_s), rel=0.05)


def test_goodput_is_that_of_simulated_runs_and_best_at_the_best_interval():
    best_s = best_interval(FAILING)
    for factor in (0.2, 0.5, 1, 2, 5):
        run = simulate_run(3000 * DAY_S, factor * best_s, FAILING)
        output = goodput(factor * best_s, FAILING.checkpoint_s, FAILING.restart_s, MEAN_S)
        assert run.goodput == pytest.approx(output, rel=0.01)
        assert run.num_failures == pytest.approx(run.wall_s / MEAN_S, rel=0.1)
        assert run == simulate_run(3000 * DAY_S, factor * best_s, FAILING)
        assert run != simulate_run(3000 * DAY_S, factor * best_s, FAILING, seed=1)
    around = best_s * np.geomspace(0.2, 5, 201)
    values = [goodput(x, FAILING.checkpoint_s, FAILING.restart_s, MEAN_S) for x in around]
    assert around[int(np.argmax(values))] == pytest.approx(best_s, rel=0.05)
    assert goodput(60, 60, 1e5, 1.0) == 0  # and no overflow


def test_without_failures_time_is_work_and_checkpoints():
    run = simulate_run(1000.0, 100.0, Machine(nodes=4, checkpoint_s=10.0))
    assert (run.wall_s, run.num_failures, run.lost_s) == (1090.0, 0, 0.0)
    assert goodput(90, 10, 60, math.inf) == 0.9
    assert goodput(math.inf, 10, 60, math.inf) == 1.0


def test_unsolvable_inputs_raise():
    with pytest.raises(ConfigError, match=r"mtbf_s=inf and checkpoint_s=0\.0"):
        best_interval(Machine(nodes=4))
    with pytest.raises(ConfigError, match="got 0"):
        simulate_run(1.0, 0, Machine(nodes=4))
