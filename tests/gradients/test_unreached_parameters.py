"""Check the list of parameters that no backward has reached since the last comparison."""

import random

import pytest

from hpctrain.gradients.step_counter import UnreachedParameters
from hpctrain.gradients.step_sync import LONG


@pytest.mark.parametrize("seed", range(3))
def test_exactly_the_parameters_without_a_gradient_in_all_steps_are_compared(seed):
    chance, names, unreached = random.Random(seed), "abcdefgh", UnreachedParameters()
    for _ in range(3):  # a comparison does not affect the next one
        without = []
        for _ in range(LONG + chance.randrange(3)):
            without.append({name for name in names if name < "d" or chance.random() < 0.9})
            unreached.count(name for name in names if name in without[-1])
        assert unreached.take() == tuple(sorted(set.intersection(*without)))


def test_too_few_steps_are_not_compared_and_still_count():
    unreached = UnreachedParameters()
    for _ in range(LONG - 1):
        unreached.count(["a", "b"])
    assert unreached.take() is None
    unreached.count(["a"])
    assert unreached.take() == ("a",)
    assert unreached.take() is None
