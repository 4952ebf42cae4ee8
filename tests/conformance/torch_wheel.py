"""Torch's own tests of torch.distributed that its wheel has, as classes that pytest collects."""

import os

from torch.testing._internal.distributed import ddp_under_dist_autograd_test as with_rpc
from torch.testing._internal.distributed.distributed_test import (
    DistributedTest,
    TestDistBackend,
)
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)
from torch.testing._internal.distributed.rpc_utils import SpawnHelper


class TestDistributed(TestDistBackend, DistributedTest._DistTestBase):
    """On any number of processes; on so many as are worth their while."""

    @property
    def world_size(self) -> int:
        """Return the number that is asked for, or the nearest from 2 to 4."""
        return min(max(int(os.environ["WORLD_SIZE"]), 2), 4)

    def setUp(self) -> None:
        """Start them."""
        super().setUp()
        self._spawn_processes()


class TestDdpComparison(with_rpc.DdpComparisonTest, TensorPipeRpcAgentTestFixture, SpawnHelper):
    """DDP beside calls of functions on other processes, of which there are four."""


class TestDdpWithin(with_rpc.DdpUnderDistAutogradTest, TensorPipeRpcAgentTestFixture, SpawnHelper):
    """DDP inside of a model of which another process has a part; six processes."""
