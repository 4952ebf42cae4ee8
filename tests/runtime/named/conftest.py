"""All ranks of the session, connected once for a module."""

from collections.abc import Generator

import pytest

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.factory import connect
from hpctrain.comm.joining import find_world
from hpctrain.config import Settings


@pytest.fixture(scope="module")
def ranks() -> Generator[Communicator]:
    """Connect, and take leave at the end."""
    connection = connect(find_world(), Settings(probe="off"))
    yield connection.comm
    if connection.presence is not None:
        connection.presence.farewell()
    connection.comm.close()
