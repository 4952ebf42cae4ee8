"""Check that nodes are detected and sums are exact for any order of the ranks of hosts."""

import ctypes
import os
import socket
from collections.abc import Generator

import pytest
import torch

from hpctrain.core.config import Settings
from tests.comm.conftest import connected

CLONE_NEWUTS = 0x04000000
LIBC = ctypes.CDLL(None, use_errno=True)

ORDERS = {
    "block": (0, 0, 1, 1),
    "cyclic": (0, 1, 0, 1),
    "mixed": (1, 0, 0, 1),
    "unequal": (0, 0, 0, 1),
    "one rank per host": (0, 1, 2, 3),
}


@pytest.fixture(params=ORDERS.values(), ids=ORDERS)
def hosts(request: pytest.FixtureRequest, world) -> Generator[tuple[int, ...]]:
    """Give this process a separate host name, as if it ran on another machine."""
    order = request.param[: world.size]
    before = os.open("/proc/self/ns/uts", os.O_RDONLY)
    assert LIBC.unshare(CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(f"host{order[world.rank]}")
    yield order
    assert LIBC.setns(before, CLONE_NEWUTS) == 0
    os.close(before)


@pytest.mark.ranks(3, 4)
@pytest.mark.requires("cluster")
def test_nodes_are_the_hosts_and_sums_cross_them(world, hosts):
    with connected(Settings()) as connection:
        topology = connection.topology
        expected = {h: tuple(r for r, host in enumerate(hosts) if host == h) for h in hosts}
        assert set(topology.nodes) == set(expected.values())
        assert topology.hosts[topology.node] == f"host{hosts[world.rank]}"
        smallest = min(map(len, expected.values()))
        assert connection.plan.num_rails == (min(2, smallest) if len(expected) > 1 else 0)

        for dtype in (torch.float64, torch.bfloat16, torch.int8):
            bucket = connection.comm.new_bucket(70_001, dtype)
            bucket.flat.copy_(torch.arange(70_001) % 5 + world.rank)
            connection.comm.allreduce_(bucket).wait()
            total = (torch.arange(70_001) % 5) * world.size + sum(range(world.size))
            assert torch.equal(bucket.flat, total.to(dtype))
