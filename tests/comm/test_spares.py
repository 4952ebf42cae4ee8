"""Check spare ranks: their selection, and that they are released at the end."""

import platform

import pytest
from mpi4py import MPI

from hpctrain.comm.spares import Spares
from hpctrain.core.errors import ConfigError


@pytest.mark.ranks(3, 4)
def test_spare_rank_is_on_the_host_with_most_ranks(world, monkeypatch):
    """The last host has one rank, which is a worker."""
    last = world.size - 1
    monkeypatch.setattr(platform, "node", lambda: "b" if world.rank == last else "a")
    spares = Spares(world, 1)
    assert spares.is_worker == (world.rank != last - 1)
    if spares.is_worker:
        assert spares.workers.size == world.size - 1
        assert spares.workers.allgather(world.rank) == [*range(last - 1), last]
    else:
        assert spares.workers == MPI.COMM_NULL


@pytest.mark.requires("recovery")
@pytest.mark.ranks(3, 4)
def test_spares_are_released_at_the_end(world):
    spares = Spares(world, world.size - 2)
    if world.rank == 0:
        spares.end()
    assert spares.wait(lambda _: None) == (world.rank < 2)


@pytest.mark.ranks(2, 3)
def test_fewer_than_two_workers_are_rejected(world):
    with pytest.raises(ConfigError, match="two or more ranks must remain"):
        Spares(world, world.size - 1)
