"""Rows from all over an array: each is copied to its place, whatever its size and their number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.io import values
from hpctrain.data.io.values import take_rows

NUM_ROWS = 300


@pytest.fixture(scope="module", autouse=True)
def few_fetched():
    patch = pytest.MonkeyPatch()
    patch.setattr(values, "_FETCHED", 1024)  # so that rows are fetched in several pieces
    yield
    patch.undo()


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(), (7,), (255, 4), (16, 16, 4), (8192,), (8193,), (0,)]),
    dtype=st.sampled_from(["u1", "<f4", "?"]),
    num_wanted=st.sampled_from([0, 1, 5, 1023, 1024, 1025, 2500]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_are_copied_to_their_places(shape, dtype, num_wanted, seed):
    generator = np.random.default_rng(seed)
    source = generator.integers(0, 2, (NUM_ROWS, *shape)).astype(dtype)
    rows = generator.integers(0, NUM_ROWS, num_wanted)
    out = np.full((num_wanted, *shape), 9).astype(dtype)
    take_rows(source, rows, out)
    assert np.array_equal(out, source[rows])
