"""When ranks synchronize between averages, and how replicas are weighted."""

import math

import pytest

from hpctrain.local_sgd.replica_weight import SampleSums
from hpctrain.local_sgd.round_clock import RoundClock


def test_a_synchronous_step_needs_no_further_synchronization():
    clock = RoundClock()
    clock.must_synchronize = True
    clock.count_step(1, synchronous=True)
    assert not clock.is_due(1, busy=False)
    clock.count_step(2, synchronous=False)
    assert clock.is_due(2, busy=True)


@pytest.mark.parametrize(("within_s", "period"), [(0.5, 1), (2.0, 2), (7.5, 7), (math.inf, None)])
def test_ranks_synchronize_after_the_steps_that_fit_into_the_time(within_s, period):
    clock, synchronized = RoundClock(), []
    clock.within_s = within_s
    clock.record_sync(0, 1.0, None)  # a step takes one second
    for step in range(1, 29):
        clock.count_step(step, synchronous=False)
        assert not clock.is_due(step, busy=True)
        if clock.is_due(step, busy=False):
            synchronized.append(step)
            clock.record_sync(step, 1.0, None)
    assert synchronized == ([] if period is None else [*range(period, 29, period)])


def test_only_an_average_resets_the_waiting_time_of_a_round():
    clock = RoundClock()
    clock.waited_s = 3.0
    clock.record_sync(1, 1.0, None)
    assert (clock.waited_s, clock.round_s) == (3.0, 0.0)
    clock.record_sync(2, 1.0, 5.0)
    assert (clock.waited_s, clock.round_s) == (0.0, 5.0)


@pytest.mark.parametrize("skipped", [set(), {1}, {0, 2}])
def test_the_weight_of_a_replica_is_its_samples_over_the_nominal_number(skipped):
    counts = [3.0, 0.0, 8.0, 5.0]
    sums = SampleSums()
    for step, count in enumerate(counts):
        sums.add(count, 4.0)
        sums.end_step(is_skipped=step in skipped)
    taken = sum(count for step, count in enumerate(counts) if step not in skipped)
    assert sums.weight == taken / (4.0 * len(counts))
    again = SampleSums()
    again.load_own_state(sums.own_state())
    assert again.weight == sums.weight
    sums.clear()
    sums.end_step(is_skipped=False)  # a step without set_num_samples counts the nominal number
    assert (sums.weight, sums.num_uncounted) == (0.0, 1)
