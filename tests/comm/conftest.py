"""Provide communicators of every kind, over all ranks of the session."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest
from mpi4py import MPI

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.factory import Connection, connect
from hpctrain.comm.mpi_world import find_world
from hpctrain.core.config import Settings
from tests.harness.features import FEATURES

PATHS = {
    "flat MPI": Settings(probe="off", shared_memory="off"),
    "one node": Settings(probe="off"),
    "nodes of one": Settings(probe="off", ranks_per_node=1),
    "nodes of two": Settings(probe="off", ranks_per_node=2),  # unequal nodes at 3 ranks
}

if not FEATURES["horovod"]():
    # Two levels at 4 ranks; flat on one node and on nodes of unequal size.
    PATHS["Horovod"] = Settings(probe="off", engine="horovod", ranks_per_node=2)


SAME = {1: {*PATHS} - {"one node"}, 2: {"nodes of two"}}.get(MPI.COMM_WORLD.size, set())
"""Paths equal to another path on this number of ranks: one rank has one path, two ranks have
one node."""


def close(connection: Connection) -> None:
    """Close a connection as ``hpctrain.shutdown`` does."""
    if connection.presence is not None:
        connection.presence.wait_for_end()
    connection.comm.close()


@contextmanager
def connected(settings: Settings) -> Generator[Connection]:
    """Connect to all ranks of the session."""
    made = connect(find_world(), settings)
    yield made
    close(made)


@pytest.fixture(params=[name for name in PATHS if name not in SAME])
def connection(request: pytest.FixtureRequest) -> Generator[Connection]:
    """Parametrize over the paths of a connection."""
    with connected(PATHS[request.param]) as made:
        yield made


@pytest.fixture
def comm(connection: Connection) -> Communicator:
    """Parametrize over the communicators of all paths."""
    return connection.comm
