"""All ranks of the session, connected once for a module, and controllers over each path."""

from collections.abc import Generator

import pytest

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.factory import connect
from hpctrain.comm.mpi_world import find_world
from hpctrain.core.config import Settings
from hpctrain.negotiation.controller import Controller
from tests.comm.conftest import PATHS, SAME, close
from tests.negotiation.controlling import controller_of


@pytest.fixture(scope="module")
def ranks() -> Generator[Communicator]:
    """Connect, and take leave at the end."""
    connection = connect(find_world(), Settings(probe="off"))
    yield connection.comm
    close(connection)


@pytest.fixture(params=sorted({"flat MPI", "one node", "nodes of two"} - SAME))
def controller(request: pytest.FixtureRequest) -> Generator[Controller]:
    """Make a controller by each path in turn."""
    connection = connect(find_world(), PATHS[request.param])
    made = controller_of(connection.comm.group(range(connection.comm.size)))
    yield made
    connection.comm.barrier()
    made.close()
    close(connection)
