"""Check intervals against the formulas of the papers, and against a trace of failures."""

import math

import numpy as np
import pytest

from hpctrain.checkpoint.schedule import CheckpointSchedule
from hpctrain.core.errors import ConfigError
from hpctrain.cost.failures import daly


def test_daly_agrees_with_the_values_of_his_formula():
    # sqrt(2 * 300 * 86400) * (1 + sqrt(x) / 3 + x / 9) - 300 with x = 300 / 172800
    assert daly(300, 86400) == pytest.approx(7200 * (1 + (1 / 24) / 3 + (1 / 576) / 9) - 300)
    assert daly(1e-6, 1e5) == pytest.approx(math.sqrt(2e-6 * 1e5), rel=1e-4)  # Young: cheap
    assert daly(0, 1e5) == 0
    assert daly(200, 100) == daly(1e9, 100) == 100  # failures are more frequent than checkpoints


class Job:
    """Compute for a given time on a machine that fails at given times; count the seconds."""

    def __init__(self, mtbf_s, cost_s, seed):
        lives_s = np.random.default_rng(seed).exponential(mtbf_s, 4000)
        self.failures = np.cumsum(lives_s).tolist()
        self.cost_s = cost_s

    def time(self, work_s, interval_s):
        """Return the time to compute for ``work_s`` with a checkpoint every ``interval_s``."""
        now, done = 0.0, 0
        pieces = math.ceil(work_s / interval_s)
        for failure in self.failures:
            more = int((failure - now) / (interval_s + self.cost_s))
            if done + more >= pieces:
                return now + (pieces - done) * (interval_s + self.cost_s)
            now, done = failure, done + more
        raise AssertionError("the trace is too short for this interval")


@pytest.mark.parametrize(
    ("mtbf_s", "cost_s"), [(86400, 5), (86400, 300), (3600, 60), (600, 60)], ids=str
)
def test_auto_is_within_5_percent_of_the_best_interval_on_a_trace_of_failures(mtbf_s, cost_s):
    schedule = CheckpointSchedule("auto", mtbf_s=mtbf_s)
    schedule.cost(cost_s, cost_s)
    job = Job(mtbf_s, cost_s, seed=1)
    work_s = 300 * mtbf_s
    auto = job.time(work_s, schedule.interval_s - cost_s)
    around = daly(cost_s, mtbf_s) * np.geomspace(0.2, 5, 41)
    assert auto <= 1.05 * min(job.time(work_s, interval_s) for interval_s in around)


def test_auto_saves_at_once_then_uses_median_costs_and_at_least_one_write():
    schedule = CheckpointSchedule("auto", mtbf_s=1000)
    assert schedule.interval_s is None
    assert schedule.due(1, 0.0)
    for stall_s in (1.0, 1.0, 100.0):
        schedule.cost(stall_s, 1.0)
    assert schedule.interval_s == pytest.approx(daly(1, 1000) + 1)
    schedule.cost(1.0, 500)
    assert schedule.interval_s == 500


def test_steps_are_due_once_in_each_interval_also_when_one_was_missed():
    schedule = CheckpointSchedule(10)
    assert [step for step in range(1, 31) if schedule.due(step, 0.0)] == list(range(10, 31))
    schedule.taken(13, 0.0)
    assert [step for step in range(14, 31) if schedule.due(step, 0.0)] == list(range(20, 31))


def test_time_interval_is_due_when_it_has_passed_and_none_is_never_due():
    schedule = CheckpointSchedule("10min", now=100.0)
    assert not schedule.due(5, 699.0)
    assert schedule.due(5, 700.0)
    schedule.taken(5, 700.0)
    assert not schedule.due(6, 1299.0)
    assert not CheckpointSchedule("none").due(10**9, 1e12)


@pytest.mark.parametrize(
    ("every", "mtbf_s"),
    [
        *((every, None) for every in (0, -3, "0s", "often", "10", "auto")),
        *(("auto", mtbf_s) for mtbf_s in (0.0, -1.0, math.nan)),
    ],
)
def test_invalid_interval_is_rejected(every, mtbf_s):
    with pytest.raises(ConfigError, match="mtbf" if every == "auto" else None):
        CheckpointSchedule(every, mtbf_s=mtbf_s)
