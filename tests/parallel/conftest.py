"""Torch's group of all ranks over our backend: of two on one node, of more on several."""

from collections.abc import Generator

import pytest
from mpi4py import MPI

from tests.process_group.conftest import NODES, started

__all__ = ["started"]

PLACED = NODES if MPI.COMM_WORLD.size > 2 else (None,)
"""How the bytes go between two nodes is for ``tests/process_group`` to say."""


@pytest.fixture(scope="module", params=PLACED, ids=lambda number: f"{number or 'all'} per node")
def nodes(request: pytest.FixtureRequest) -> Generator[None]:
    """Start the group of all ranks, so many on each node."""
    with started(request.param):
        yield
