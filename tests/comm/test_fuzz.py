"""Operations drawn at random give what numpy gives, by every path; the same bits on all ranks."""

import pytest

from tests.comm.fuzz import fuzz

NUM_CASES = 1000
"""By each path of ours; ``python -m tests.comm.fuzz -n N --seed S`` on any ranks for more."""
NUM_CASES_OF_HOROVOD = 200
"""Each takes a cycle of Horovod's, a millisecond, or several."""


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.limit(120)
def test_random_collectives_equal_numpy(world, connection):
    by_horovod = connection.plan.engine == "horovod"
    num_cases = NUM_CASES_OF_HOROVOD if by_horovod else NUM_CASES
    fuzz(connection.comm, num_cases, seed=world.size)
