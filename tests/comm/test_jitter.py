"""Ranks that come late neither overwrite what others read nor read what is not there yet."""

import pytest
import torch

from hpctrain.comm.factory import connect
from hpctrain.comm.mpi_world import find_world
from tests.comm.conftest import PATHS, close

ROUNDS = 8
NUMELS = (1, 1000, 40_003)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("path", ["one node", "MPI window", "nodes of two"])
def test_sums_through_node_memory_are_right_when_ranks_come_late(world, jitter, path):
    jitter()
    connection = connect(find_world(), PATHS[path])
    comm, total = connection.comm, sum(range(1, world.size + 1))
    buckets = [comm.new_bucket(numel, torch.float64) for numel in NUMELS]
    for number in range(ROUNDS):
        for bucket in buckets:
            bucket.flat.fill_((number + 1) * (world.rank + 1))
            comm.allreduce_(bucket).wait()
            assert bool((bucket.flat == (number + 1) * total).all())
        tensor = torch.full((100_003,), float((number + 1) * (world.rank + 1)))
        comm.allreduce_(tensor).wait()
        assert bool((tensor == (number + 1) * total).all())
    close(connection)
