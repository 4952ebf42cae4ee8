"""Provide the ranks, and a directory for their checkpoints."""

import pytest

from hpctrain.comm.mpi import MpiCommunicator


@pytest.fixture
def comm(world):
    return MpiCommunicator(world)


@pytest.fixture
def root(world, tmp_path):
    return world.bcast(tmp_path) / "run" / "checkpoints"
