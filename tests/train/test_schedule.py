import itertools

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.train.config import ScheduleConfig
from hpctrain.train.task import make_schedule


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_the_rate_rises_to_its_peak_during_warm_up_and_never_after(name):
    at = make_schedule(ScheduleConfig(name=name, warmup_epochs=2.0), 10, 100)
    rates = [at(step) for step in range(100)]
    assert all(a < b for a, b in itertools.pairwise(rates[:20]))
    assert all(a >= b for a, b in itertools.pairwise(rates[20:]))
    assert rates[0] > 0
    assert max(rates) == rates[20] == 1.0


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_rate_falls_towards_the_final_share(name):
    at = make_schedule(ScheduleConfig(name=name, args={"final": 0.1}), 10, 100)
    assert at(0) == 1.0
    assert at(50) == pytest.approx(0.55)
    assert at(100) == pytest.approx(0.1)


def test_a_warm_up_longer_than_the_run_is_a_warm_up():
    at = make_schedule(ScheduleConfig(warmup_epochs=50.0), 1, 10)
    assert at(9) == pytest.approx(10 / 51)


def test_unknown_schedules_and_arguments_are_refused():
    with pytest.raises(ConfigError, match="one of constant, linear, cosine, got 'step'"):
        make_schedule(ScheduleConfig(name="step"), 1, 1)
    with pytest.raises(ConfigError, match=r"schedule.args: cosine .* did you mean final\?"):
        make_schedule(ScheduleConfig(args={"finall": 0.1}), 1, 1)
