"""torch.distributed over our backend, on one node and on several."""

import os
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from mpi4py import MPI

import hpctrain

# The launcher's, for other programs: torch's store of one port cannot be made again and again,
# as a rank may come to the one before while that goes. Without it ranks meet over MPI.
for name in ("MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

# Their names before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def started(per_node: int | None = None, **options: object) -> Generator[None]:
    """Be in a world with so many ranks per node, and in torch's group of all of them."""
    hpctrain.init(ranks_per_node=per_node)
    dist.init_process_group("hpctrain", **options)
    yield
    dist.destroy_process_group()
    hpctrain.shutdown()


@pytest.fixture
def ours() -> Generator[None]:
    """Start the group of all ranks, on one node."""
    with started():
        yield


NODES = {2: (None, 1), 3: (None, 2), 4: (2,)}.get(MPI.COMM_WORLD.size, (None,))
"""Ranks per node: one node, a rank on each, unequal ones and two by two."""


@pytest.fixture(scope="module", params=NODES, ids=lambda number: f"{number or 'all'} per node")
def nodes(request: pytest.FixtureRequest) -> Generator[None]:
    """Start the group of all ranks, on one node and on several."""
    with started(request.param):
        yield
