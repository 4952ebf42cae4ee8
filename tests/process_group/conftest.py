"""Fixtures for torch.distributed with our backend, on one node and on several."""

import os
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from mpi4py import MPI

import hpctrain

# Variables of the launcher. A TCPStore cannot be created repeatedly on one port: a rank may reach
# the previous store while that closes. Without the variables, ranks synchronize over MPI.
for name in ("MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

# Names before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def started(per_node: int | None = None, **options: object) -> Generator[None]:
    """Initialize the world with ``per_node`` ranks per node, and a process group of all ranks."""
    hpctrain.init(ranks_per_node=per_node)
    dist.init_process_group("hpctrain", **options)
    yield
    dist.destroy_process_group()
    hpctrain.shutdown()


@pytest.fixture
def ours() -> Generator[None]:
    """Process group of all ranks, on one node."""
    with started():
        yield


NODES = {2: (None, 1), 3: (None, 2), 4: (2,)}.get(MPI.COMM_WORLD.size, (None,))
"""Ranks per node by world size: None is one node; 2 on three ranks gives unequal nodes."""


@pytest.fixture(scope="module", params=NODES, ids=lambda number: f"{number or 'all'} per node")
def nodes(request: pytest.FixtureRequest) -> Generator[None]:
    """Process group of all ranks, on one node and on several."""
    with started(request.param):
        yield
