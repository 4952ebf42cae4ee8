"""Check laws of learning against short simulations."""

import math

import numpy as np
import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.cost.learning import fewest_rounds, most_local_steps, noise_scale, samples_needed


def test_two_batches_give_the_noise_scale_within_3_percent():
    random = np.random.default_rng(0)
    true, spread = random.normal(size=50) * 0.5, 0.8
    sizes = (4, 64)

    def mean_norm(batch):
        noise = random.normal(size=(20_000, 50)) * spread / math.sqrt(batch)
        return float(((true + noise) ** 2).sum(axis=1).mean())

    exact = 50 * spread**2 / float(true @ true)
    small, large = ((batch, mean_norm(batch)) for batch in sizes)
    assert noise_scale(small, large) == pytest.approx(exact, rel=0.03)
    assert noise_scale(large, small) == noise_scale(small, large)


@pytest.mark.parametrize(
    ("small", "large", "message"),
    [
        ((32, 1.0), (32, 2.0), "two batch sizes"),
        ((32, 1.0), (256, 1.1), "decrease with the batch"),
        ((32, 8.0), (256, 0.9), "average over more"),
    ],
)
def test_norms_that_cannot_be_are_refused(small, large, message):
    with pytest.raises(ConfigError, match=message):
        noise_scale(small, large)


def test_needed_samples_equal_those_of_sgd_on_a_quadratic():
    """With the best step on a quadratic, loss falls by a factor of 1 / (1 + scale / batch)."""
    scale = 100.0
    for batch in (10, 100, 1000):
        fall = 1 / (1 + scale / batch)
        tiny = 1 / (1 + scale / 1e-9) / 1e-9  # per sample
        assert samples_needed(1, scale, batch) == pytest.approx(tiny / (fall / batch), rel=1e-6)
    assert samples_needed(7, math.inf, 10**9) == 7


def test_the_bounds_are_those_of_the_papers():
    assert most_local_steps(6400, 4, 16) == pytest.approx(10)
    assert fewest_rounds(100, math.exp(-3)) == pytest.approx(30)
