"""Collect the tests of torch.distributed that torch's wheel contains."""

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
    """Tests of torch.distributed on a number of processes that the tests support."""

    @property
    def world_size(self) -> int:
        """Return the requested number, or the nearest from 2 to 4."""
        return min(max(int(os.environ["WORLD_SIZE"]), 2), 4)

    def setUp(self) -> None:
        """Start the processes."""
        super().setUp()
        self._spawn_processes()


class TestDdpComparison(with_rpc.DdpComparisonTest, TensorPipeRpcAgentTestFixture, SpawnHelper):
    """Compare DDP with RPC to other processes; there are four processes."""


class TestDdpWithin(with_rpc.DdpUnderDistAutogradTest, TensorPipeRpcAgentTestFixture, SpawnHelper):
    """Train with DDP inside a model that is partly on another process; there are six processes."""
