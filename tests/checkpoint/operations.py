"""Provide the slope of the number of operations of a call over the size of the input."""

from functools import partial

from tests.harness.growth import slope_of


def slope(function, of_size, size):
    """Return the slope of the operations over the size, on logarithmic axes."""
    return slope_of(lambda number: partial(function, *of_size(number)), (size, 2 * size))
