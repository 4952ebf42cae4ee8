"""Process group of all ranks with our backend: on one node for two ranks, else on several."""

from collections.abc import Generator

import pytest
from mpi4py import MPI

from tests.process_group.conftest import NODES, started

__all__ = ["started"]

PLACED = NODES if MPI.COMM_WORLD.size > 2 else (None,)
"""Ranks per node; communication between nodes is tested in ``tests/process_group``."""


@pytest.fixture(scope="module", params=PLACED, ids=lambda number: f"{number or 'all'} per node")
def nodes(request: pytest.FixtureRequest) -> Generator[None]:
    """Process group of all ranks, with a given number of ranks per node."""
    with started(request.param):
        yield
