"""Spikes of a loss are detected from the spread of the recent losses only."""

import math
import random
import statistics

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.optim import LossSpikes


def output(losses, **how):
    spikes, found = LossSpikes(**how), []
    for loss in losses:
        found.append(spikes.is_spike(loss))
        if not found[-1]:
            spikes.see(loss)
    return spikes, found


def falling(num: int, noise: float = 0.05):
    drawn = random.Random(0)
    return [5 * math.exp(-step / 200) + 1 + noise * drawn.gauss(0, 1) for step in range(num)]


def test_noise_of_a_falling_loss_is_no_spike_and_an_outlier_is():
    losses = falling(2000)
    losses[700] += 1.0
    _, found = output(losses)
    assert [step for step, is_spike in enumerate(found) if is_spike] == [700]


def test_the_limit_follows_median_and_median_absolute_deviation():
    losses = falling(64)
    spikes, _ = output(losses, deviations=4, window=64)
    median = statistics.median(losses)
    spread = statistics.median(abs(loss - median) for loss in losses)
    assert spikes.limit == pytest.approx(median + 4 * 1.4826 * spread)


def test_a_constant_loss_has_a_limit_some_percent_above():
    spikes, _ = output([2.0] * 64, deviations=6)
    assert spikes.limit == pytest.approx(2 * 1.06)


def test_before_half_a_window_only_nonfinite_losses_are_spikes():
    spikes, found = output([1.0, 1e9, math.nan], window=6)
    assert found == [False, False, True]
    spikes.see(math.inf)
    assert spikes.limit == math.inf
    spikes.see(1.0)
    assert spikes.limit < math.inf


def test_a_loaded_state_has_the_same_limit():
    spikes, _ = output(falling(100))
    other = LossSpikes()
    other.load_state_dict(spikes.state_dict())
    assert other.limit == spikes.limit


@pytest.mark.parametrize("how", [{"deviations": 0}, {"window": 0}])
def test_invalid_arguments_are_rejected(how):
    with pytest.raises(ConfigError, match=r"must be (above 0|at least 1)"):
        LossSpikes(**how)
