"""Fixtures: a communicator of all ranks, once per module, and controllers over each path."""

from collections.abc import Generator

import pytest

from hpctrain.comm.communicator import Communicator
from hpctrain.core.config import Settings
from hpctrain.negotiation.controller import Controller
from tests.comm.conftest import PATHS, SAME, connected
from tests.negotiation.controlling import controller_of


@pytest.fixture(scope="module")
def ranks() -> Generator[Communicator]:
    """Communicator of all ranks, closed at the end of the module."""
    with connected(Settings(probe="off")) as connection:
        yield connection.comm


@pytest.fixture(params=sorted({"flat MPI", "one node", "nodes of two"} - SAME))
def controller(request: pytest.FixtureRequest) -> Generator[Controller]:
    """Provide a controller, once for each communication path."""
    with connected(PATHS[request.param]) as connection:
        made = controller_of(connection.comm.group(range(connection.comm.size)))
        yield made
        connection.comm.barrier()
        made.close()
