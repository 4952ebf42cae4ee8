"""Simulated runs with failures: Young's and Daly's interval, and time that adds up."""

import math

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.cost.machine import Machine
from hpctrain.cost.simulated_run import best_interval, simulate_run, simulated_goodput

DAY_S = 86400.0


def failing(checkpoint_s, *, nodes=1000, restart_s=300.0, mtbf_s=5 * 365 * DAY_S):
    return Machine(nodes=nodes, mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=restart_s)


@pytest.mark.parametrize("restart_s", [0.0, 600.0])
@pytest.mark.parametrize("nodes", [10, 1000, 10_000])
@pytest.mark.parametrize("checkpoint_s", [5.0, 60.0, 600.0])
def test_the_best_interval_is_daly_s(checkpoint_s, nodes, restart_s):
    mean_s = 5 * 365 * DAY_S / nodes
    ratio = checkpoint_s / (2 * mean_s)
    young = math.sqrt(2 * checkpoint_s * mean_s)
    daly = young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s
    found = best_interval(failing(checkpoint_s, nodes=nodes, restart_s=restart_s))
    assert found == pytest.approx(daly, rel=0.05)
    if ratio < 1e-3:
        assert found == pytest.approx(young, rel=0.05)


def test_no_other_interval_is_better():
    machine = failing(120.0)
    best = best_interval(machine)
    most = simulated_goodput(best, machine)
    assert all(simulated_goodput(best * factor, machine) < most for factor in (0.5, 0.8, 1.25, 2))


def test_a_long_run_has_the_goodput_of_many_failures():
    machine = failing(120.0)
    interval_s = best_interval(machine)
    run = simulate_run(3000 * DAY_S, interval_s, machine)
    assert run.goodput == pytest.approx(simulated_goodput(interval_s, machine), rel=0.01)
    assert run.num_failures == pytest.approx(run.wall_s / (5 * 365 * DAY_S / 1000), rel=0.1)
    assert run == simulate_run(3000 * DAY_S, interval_s, machine)
    assert run != simulate_run(3000 * DAY_S, interval_s, machine, seed=1)


def test_without_failures_time_is_work_and_checkpoints():
    run = simulate_run(1000.0, 100.0, Machine(nodes=4, checkpoint_s=10.0))
    assert (run.wall_s, run.num_failures, run.lost_s) == (1090.0, 0, 0.0)
    assert simulated_goodput(100.0, Machine(nodes=4, checkpoint_s=10.0)) == 10 / 11


def test_what_has_no_answer_is_named():
    with pytest.raises(ConfigError, match=r"mtbf_s=inf and checkpoint_s=0\.0"):
        best_interval(Machine(nodes=4))
    with pytest.raises(ConfigError, match="got 0"):
        simulate_run(1.0, 0, Machine(nodes=4))
