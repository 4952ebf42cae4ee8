"""Operations drawn at random give what numpy gives, by every path; the same bits on all ranks."""

import pytest

from tests.comm.fuzz import fuzz

NUM_CASES = 1000
"""By each of five paths; ``python -m tests.comm.fuzz -n N --seed S`` on any ranks for more."""


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.limit(120)
def test_random_collectives_equal_numpy(world, comm):
    fuzz(comm, NUM_CASES, seed=world.size)
